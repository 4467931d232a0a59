"""Device servers of two hosts build a communicator over the data network, by way of their proxyds' stores."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from namespaces import Network, network
from proxied import WORKLOADS

from understudy.recovery.membership.network.certificates import issue, make_authority


def rank_on(net: Network, certs: Path, number: int, temporary: str) -> subprocess.Popen[str]:
    host = "ab"[number]
    return subprocess.Popen(
        [*net.inside(host), sys.executable, "-P", str(WORKLOADS / "peer_store_rank.py"), str(number), host,
         net.data_addresses[host], str(certs), f"{net.addresses['a']}:9400"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": temporary},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def told(rank: subprocess.Popen[str]) -> Any:
    assert rank.stdout is not None
    return json.loads(rank.stdout.readline())


def test_ranks_on_two_hosts_reduce_over_the_data_network_and_meet_over_the_other() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-test-", dir="/tmp")))
        net = stack.enter_context(network("a", "b", data=True))
        certs = folder / "certs"
        make_authority(certs, "tests")
        for host in "ab":
            issue(certs, host)
        ranks = [rank_on(net, certs, number, str(folder)) for number in (0, 1)]
        try:
            a, b = (told(rank) for rank in ranks)
        finally:
            for rank in ranks:
                rank.communicate(timeout=60)
        assert a["sum"] == b["sum"] == [3.0]
        control, data = net.addresses, net.data_addresses
        assert set(a["listening"]) <= {control["a"], data["a"]} and set(b["listening"]) <= {data["b"]}
        assert [data["a"], data["b"]] in a["peers"] and [data["b"], data["a"]] in b["peers"]
        assert {tuple(pair) for pair in b["peers"]} == {(data["b"], data["a"]), (control["b"], control["a"])}
