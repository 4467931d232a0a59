"""`proxyd`: one per node; owns logs, keeps device servers running, recovers jobs."""

from __future__ import annotations

from understudy.protos import least_tls  # before whatever else loads gRPC

# isort: split
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from understudy.recovery.allocation import keep_freed_memory
from understudy.recovery.command_line import BAD_INPUT, Parser, check_variables, say
from understudy.recovery.daemon import serve
from understudy.recovery.membership.options import add_options, membership_of
from understudy.recovery.persistence.retention import Retention
from understudy.recovery.persistence.settings import MirrorSettings, PersistenceSettings, Writing
from understudy.recovery.runtime_directory import SHARED_MEMORY
from understudy.recovery.settings import (
    BadInput,
    Settings,
    parse_address,
    parse_bytes,
    parse_devices,
    parse_interval,
    parse_log_directory,
    parse_seconds,
    parse_share,
)
from understudy.recovery.socket_path import default_socket
from understudy.recovery.spawner import SpawnerError
from understudy.recovery.structured_log import configure

PROGRAM = "proxyd"
OF_PERSIST = (
    "persist_every", "persist_overhead", "persist_slots", "persist_only", "persist_log", "persist_threads",
    "persist_chunk", "persist_memory", "cpu_image_every", "keep_runs", "mirror", "keep_last", "keep_every",
)  # fmt: skip
"""Options that say something of --persist."""


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
        "--persist-every",
        default="30",
        metavar="TIME",
        help="between two of them: seconds at least, so many steps, as 10steps, or auto (30)",
    )
    parser.add_argument(
        "--persist-overhead", default="", metavar="SHARE",
        help="of the time that --persist-every auto may cost (3%%)",
    )  # fmt: skip
    parser.add_argument(
        "--persist-slots", type=int, default=3, metavar="N",
        help="room for so many of each rank: one that is complete, the others under way (3)",
    )  # fmt: skip
    parser.add_argument(
        "--persist-only", action="store_true",
        help="once they are there they leave this node's memory, and the log is kept from there on (off)",
    )  # fmt: skip
    parser.add_argument(
        "--persist-log", action="store_true",
        help="the log behind the newest of them goes there too: a power cut costs a minibatch (off)",
    )  # fmt: skip
    parser.add_argument(
        "--persist-threads", type=int, default=Writing.threads, metavar="P",
        help=f"writing each rank's part of one ({Writing.threads})",
    )  # fmt: skip
    parser.add_argument(
        "--persist-chunk", default="4MiB", metavar="SIZE", help="the unit of writes and checksums (4MiB)"
    )
    parser.add_argument(
        "--log-dir", default="", metavar="DIRECTORY",
        help="where logs and snapshots of the running jobs lie, if shared memory is too small for them: on a "
        "disk, which is slower (/dev/shm)",
    )  # fmt: skip
    parser.add_argument(
        "--persist-memory", default="64MiB", metavar="SIZE", help="of a rank, for chunks under way (64MiB)"
    )
    parser.add_argument(
        "--cpu-image-every", default="", metavar="SECONDS",
        help="images of the workers on other hosts of a job that is led from here, so far apart and kept "
        "below --persist, so that a rank comes back if its host is lost (off)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-runs", type=int, default=3, metavar="N",
        help="runs of a job whose snapshots stay under --persist, counting from its newest start (3)",
    )  # fmt: skip
    parser.add_argument(
        "--mirror", default="", metavar="URL",
        help="copy what --persist has completed there too, in the background: s3://bucket/prefix, "
        "file:///mnt/nfs, … (off)",
    )  # fmt: skip
    parser.add_argument("--keep-last", type=int, metavar="N", help="snapshots of a job that stay there (3)")
    parser.add_argument(
        "--keep-every", type=int, metavar="STEPS",
        help="beside them the first snapshot of every so many steps; 0: none (0)",
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
        help="execute every N-th minibatch twice, to see that replay gives the same bits; a rank alone no "
        "more often than its snapshots for that take 1%% of the time; 0: never (1000)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics", default="", metavar="[HOST:]PORT",
        help="serve metrics for Prometheus there, on this machine only unless a host is named (off)",
    )  # fmt: skip
    add_options(parser)
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
    return _settings(given), given.ready_fd, given.parent_pid, given.log_level


def _settings(given: Any) -> Settings:
    """Raises BadInput."""
    if not 0 <= given.spares <= 64:
        raise BadInput(f"--spares {given.spares} is not possible: 0 to 64")
    if given.validate_every < 0:
        raise BadInput(f"--validate-every {given.validate_every} is not possible: 0 or more")
    if given.metrics:
        parse_address(given.metrics)
    return Settings(
        devices=parse_devices(given.devices),
        socket=(given.socket or default_socket()).absolute(),
        spares=given.spares,
        log_bytes=parse_bytes(given.log_cap, "--log-cap"),
        log_directory=parse_log_directory(given.log_dir, "--log-dir") if given.log_dir else SHARED_MEMORY,
        shadow_bytes=parse_bytes(given.shadow_limit, "--shadow-limit"),
        snapshot_overhead=parse_share(given.snapshot_overhead, "--snapshot-overhead"),
        snapshot_bytes=parse_bytes(given.snapshot_limit, "--snapshot-limit"),
        optimizer_preimages=given.optimizer_preimages,
        validate_every=given.validate_every,
        hang_timeout_s=parse_seconds(given.hang_timeout, "--hang-timeout"),
        persist=_persistence(given),
        cpu_image_every_s=_image_interval(given),
        metrics=given.metrics,
        membership=membership_of(given),
        adoption_grace_s=parse_seconds(given.adoption_grace, "--adoption-grace"),
    )


def _image_interval(given: Any) -> float:
    """Seconds; raises BadInput."""
    if not given.cpu_image_every:
        return 0.0
    if not given.etcd:
        raise BadInput(
            f"--cpu-image-every {given.cpu_image_every} is of no use without --etcd: it is for workers on "
            "other hosts"
        )
    return parse_seconds(given.cpu_image_every, "--cpu-image-every", example="60")


def _persistence(given: Any) -> PersistenceSettings | None:
    """Raises BadInput."""
    if given.persist is None:
        for name in OF_PERSIST:
            if (value := getattr(given, name)) != parser().get_default(name):
                flag = f"--{name.replace('_', '-')}"
                told = flag if value is True else f"{flag} {value}"
                raise BadInput(f"{told} is of no use without --persist DIRECTORY")
        return None
    if parse_share(given.snapshot_overhead, "--snapshot-overhead") == 0:
        raise BadInput("--persist needs snapshots, which --snapshot-overhead 0 switches off")
    if not 2 <= given.persist_slots <= 16:
        raise BadInput(f"--persist-slots {given.persist_slots} is not possible: 2 to 16")
    writing = _writing(given)
    if given.keep_runs < 1:
        raise BadInput(f"--keep-runs {given.keep_runs} is not possible: 1 or more")
    directory = given.persist.absolute()
    try:
        if not directory.is_dir():  # mkdir waits for a disk that hangs, even where there is nothing to do
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"--persist {directory} cannot be made: {problem.strerror}") from problem
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise BadInput(f"--persist {directory} cannot be written")
    seconds, steps, overhead = _how_often(given)
    return PersistenceSettings(
        directory, seconds, steps, given.persist_slots,
        stays_in_memory=not given.persist_only, writing=writing, overhead=overhead, mirror=_mirror(given),
        keep_runs=given.keep_runs, keeps_log=given.persist_log,
    )  # fmt: skip


def _how_often(given: Any) -> tuple[float, int, float]:
    """Seconds, or steps, or the share of the time by which it is chosen; raises BadInput."""
    if given.persist_every.strip() != "auto":
        if given.persist_overhead:
            raise BadInput(
                f"--persist-overhead {given.persist_overhead} is of no use without --persist-every auto"
            )
        return *parse_interval(given.persist_every, "--persist-every"), 0.0
    share = given.persist_overhead or "3%"
    overhead = parse_share(share, "--persist-overhead")
    if overhead == 0:
        raise BadInput(f"--persist-overhead {share!r} leaves no time for snapshots: write for example 3%")
    return 0.0, 0, overhead


def _writing(given: Any) -> Writing:
    """Raises BadInput."""
    if not 1 <= given.persist_threads <= 64:
        raise BadInput(f"--persist-threads {given.persist_threads} is not possible: 1 to 64")
    chunk = parse_bytes(given.persist_chunk, "--persist-chunk")
    if chunk % 4096 or chunk > 256 << 20:
        raise BadInput(
            f"--persist-chunk {given.persist_chunk} is not possible: a multiple of 4KiB, up to 256MiB"
        )
    memory = parse_bytes(given.persist_memory, "--persist-memory")
    if memory < chunk:
        raise BadInput(
            f"--persist-memory {given.persist_memory} does not hold one --persist-chunk of {chunk} bytes"
        )
    return Writing(given.persist_threads, chunk, memory)


def _mirror(given: Any) -> MirrorSettings | None:
    """Raises BadInput."""
    told = {"keep_last": given.keep_last, "keep_every": given.keep_every}
    told = {name: number for name, number in told.items() if number is not None}
    for name, number in told.items():
        flag, least = f"--{name.replace('_', '-')} {number}", int(name == "keep_last")
        if not given.mirror:
            raise BadInput(f"{flag} says what stays at a --mirror, and none was named")
        if number < least:
            raise BadInput(f"{flag} is not possible: {least} or more")
    if not given.mirror:
        return None
    from understudy.recovery.persistence.remote import check_url  # libraries that are seldom needed

    try:
        check_url(given.mirror)
    except BadInput as problem:
        raise BadInput(f"--mirror {problem}") from problem
    return MirrorSettings(given.mirror, Retention(**told))


def main() -> int:
    """Entry point."""
    given = parser().parse_args()
    ready_fd: int = given.ready_fd  # first of all: proxyrun waits for an answer there, whatever it is

    def tell(message: dict[str, object]) -> None:
        nonlocal ready_fd
        if ready_fd >= 0:
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
            os.close(ready_fd)
            ready_fd = -1

    try:
        settings = _settings(given)
        check_variables(PROGRAM, warn=ready_fd < 0)  # proxyrun has warned already
        configure(given.log_level)
        keep_freed_memory()
        if not least_tls.IN_FORCE:
            raise RuntimeError(
                "gRPC was loaded before understudy.protos.least_tls: TLS 1.2 would be spoken, too"
            )
        asyncio.run(serve(settings, lambda: tell({"ready": True}), given.parent_pid))
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
