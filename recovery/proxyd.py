"""`proxyd`: one per node; owns logs, keeps device servers running, recovers jobs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from recovery.command_line import BAD_INPUT, Parser, check_variables, say
from recovery.daemon import serve
from recovery.persistence.settings import PersistenceSettings
from recovery.settings import (
    BadInput,
    Settings,
    parse_address,
    parse_bytes,
    parse_devices,
    parse_seconds,
    parse_share,
)
from recovery.socket_path import default_socket
from recovery.spawner import SpawnerError
from recovery.structured_log import configure

PROGRAM = "proxyd"


def parser() -> Parser:
    """The command line."""
    parser = Parser(prog=PROGRAM, description="Own this node's devices and keep training jobs alive on them.")
    parser.add_argument("--devices", required=True, metavar="KIND:COUNT", help="cpu:2, cuda:8")
    parser.add_argument("--socket", type=Path, help="default: $UNDERSTUDY_SOCKET or in $XDG_RUNTIME_DIR")
    parser.add_argument(
        "--spares", type=int, default=1, metavar="N", help="warm device servers kept ready (1)"
    )
    parser.add_argument(
        "--log-cap", default="4GiB", metavar="SIZE", help="of the replay log of a rank (4GiB)"
    )
    parser.add_argument(
        "--shadow-limit", default="8GiB", metavar="SIZE", help="of the saved state of a rank (8GiB)"
    )
    parser.add_argument(
        "--snapshot-overhead", default="1%", metavar="SHARE",
        help="of the time for snapshots of the whole state; 0 switches them off (1%%)",
    )  # fmt: skip
    parser.add_argument(
        "--snapshot-limit", default="8GiB", metavar="SIZE", help="of the snapshots of a rank (8GiB)"
    )
    parser.add_argument(
        "--persist", type=Path, metavar="DIRECTORY",
        help="copy snapshots there, so that they outlive this node's memory (off)",
    )  # fmt: skip
    parser.add_argument(
        "--persist-every", default="30", metavar="SECONDS", help="the least time between two of them (30)"
    )
    parser.add_argument(
        "--persist-slots", type=int, default=3, metavar="N",
        help="room for so many of each rank: one that is complete, the others under way (3)",
    )  # fmt: skip
    parser.add_argument(
        "--optimizer-preimages", choices=["auto", "on", "off"], default="auto",
        help="keep what an optimizer step overwrites, so that it can be undone (auto: on for cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--hang-timeout", default="300", metavar="SECONDS",
        help="the longest that a record or a collective may take, whatever seems to go on (300)",
    )  # fmt: skip
    parser.add_argument(
        "--validate-every", type=int, default=1000, metavar="N",
        help="execute every N-th minibatch twice, to see that replay gives the same bits; 0: never (1000)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", default="", metavar="[HOST:]PORT",
        help="serve metrics for Prometheus there, on this machine only unless a host is named (off)",
    )  # fmt: skip
    parser.add_argument(
        "--adoption-grace", default="600", metavar="SECONDS",
        help="how long a job whose worker waits or has ended outlives a proxyd that died (600)",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    parser.add_argument(
        "--ready-fd", type=int, default=-1, help="for proxyrun: where to tell that it is ready"
    )
    parser.add_argument("--parent-pid", type=int, default=0, help="for proxyrun: stop when this process ends")
    return parser


def settings_of(arguments: list[str] | None = None) -> tuple[Settings, int, int, str]:
    """Settings, ready fd, parent pid, log level; raises BadInput."""
    given = parser().parse_args(arguments)
    if not 0 <= given.spares <= 64:
        raise BadInput(f"--spares {given.spares} is not possible: 0 to 64")
    if given.validate_every < 0:
        raise BadInput(f"--validate-every {given.validate_every} is not possible: 0 or more")
    if given.metrics:
        parse_address(given.metrics)
    settings = Settings(
        devices=parse_devices(given.devices),
        socket=(given.socket or default_socket()).absolute(),
        spares=given.spares,
        log_bytes=parse_bytes(given.log_cap, "--log-cap"),
        shadow_bytes=parse_bytes(given.shadow_limit, "--shadow-limit"),
        snapshot_overhead=parse_share(given.snapshot_overhead, "--snapshot-overhead"),
        snapshot_bytes=parse_bytes(given.snapshot_limit, "--snapshot-limit"),
        optimizer_preimages=given.optimizer_preimages,
        validate_every=given.validate_every,
        hang_timeout_s=parse_seconds(given.hang_timeout, "--hang-timeout"),
        persist=_persistence(given),
        metrics=given.metrics,
        adoption_grace_s=parse_seconds(given.adoption_grace, "--adoption-grace"),
    )
    return settings, given.ready_fd, given.parent_pid, given.log_level


def _persistence(given: Any) -> PersistenceSettings | None:
    """Raises BadInput."""
    if given.persist is None:
        return None
    if given.snapshot_overhead == "0":
        raise BadInput("--persist needs snapshots, which --snapshot-overhead 0 switches off")
    if not 2 <= given.persist_slots <= 16:
        raise BadInput(f"--persist-slots {given.persist_slots} is not possible: 2 to 16")
    directory = given.persist.absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"--persist {directory} cannot be made: {problem.strerror}") from problem
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise BadInput(f"--persist {directory} cannot be written")
    every = parse_seconds(given.persist_every, "--persist-every")
    return PersistenceSettings(directory, every, given.persist_slots)


def main() -> int:
    """Entry point."""
    ready_fd = -1

    def tell(message: dict[str, object]) -> None:
        nonlocal ready_fd
        if ready_fd >= 0:
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
            os.close(ready_fd)
            ready_fd = -1

    try:
        settings, ready_fd, parent_pid, level = settings_of()
        check_variables(PROGRAM, warn=ready_fd < 0)  # proxyrun has warned already
        configure(level)
        asyncio.run(serve(settings, lambda: tell({"ready": True}), parent_pid))
    except (BadInput, SpawnerError) as problem:
        if ready_fd >= 0:
            tell({"error": str(problem)})
        else:
            say(PROGRAM, str(problem))
        return BAD_INPUT
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
