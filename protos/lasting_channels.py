"""How connections to other hosts are kept: whoever is at the other end, and whatever they carry."""

from typing import Any

LASTING: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 5000),  # a link that was cut tells nobody
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
