"""`proxyd`: one per node; owns logs, keeps device servers running, recovers jobs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from recovery.command_line import BAD_INPUT, Parser, check_variables, say
from recovery.daemon import serve
from recovery.settings import BadInput, Settings, parse_bytes, parse_devices
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
        "--optimizer-preimages", choices=["auto", "on", "off"], default="auto",
        help="keep what an optimizer step overwrites, so that it can be undone (auto: on for cpu)",
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
    settings = Settings(
        devices=parse_devices(given.devices),
        socket=(given.socket or default_socket()).absolute(),
        spares=given.spares,
        log_bytes=parse_bytes(given.log_cap, "--log-cap"),
        shadow_bytes=parse_bytes(given.shadow_limit, "--shadow-limit"),
        optimizer_preimages=given.optimizer_preimages,
    )
    return settings, given.ready_fd, given.parent_pid, given.log_level


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
