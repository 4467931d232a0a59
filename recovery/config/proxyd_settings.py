"""From the options of proxyd to its settings: every mistake is one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from understudy.recovery.base.errors import BadInput
from understudy.recovery.config.cluster_options import membership_of
from understudy.recovery.config.command_line import given_to
from understudy.recovery.config.proxyd_options import OF_PERSIST, ProxydOptions, proxyd_command
from understudy.recovery.config.settings import (
    AREA_BYTES,
    DeviceSpec,
    Settings,
    parse_address,
    parse_bytes,
    parse_devices,
    parse_interval,
    parse_log_directory,
    parse_seconds,
    parse_share,
)
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY
from understudy.recovery.machine.socket_path import default_socket
from understudy.recovery.snapshots.settings import (
    MirrorSettings,
    PersistenceSettings,
    Writing,
    check_directory,
)
from understudy.recovery.snapshots.stores.retention import Retention

PROGRAM = "proxyd"


def options_of(arguments: Sequence[str] | None = None) -> ProxydOptions:
    """What a command line says; raises BadInput."""
    given: ProxydOptions = given_to(proxyd_command(), PROGRAM, arguments)
    return given


def settings_of(arguments: Sequence[str] | None = None) -> Settings:
    """What a command line asks for; raises BadInput."""
    return settings_from(options_of(arguments))


def settings_from(given: ProxydOptions) -> Settings:
    """What they ask for; raises BadInput."""
    if not 0 <= given.spares <= 64:
        raise BadInput(f"--spares {given.spares} is not possible: 0 to 64")
    if given.validate_every < 0:
        raise BadInput(f"--validate-every {given.validate_every} is not possible: 0 or more")
    if given.metrics:
        parse_address(given.metrics)
    devices = parse_devices(given.devices)
    return Settings(
        devices=devices,
        socket=(given.socket or default_socket()).absolute(),
        spares=given.spares,
        log_bytes=parse_bytes(given.log_cap, "--log-cap"),
        log_directory=parse_log_directory(given.log_dir, "--log-dir") if given.log_dir else SHARED_MEMORY,
        shadow_bytes=_area_bytes(given.shadow_limit, "--shadow-limit", devices),
        snapshot_overhead=parse_share(given.snapshot_overhead, "--snapshot-overhead"),
        snapshot_bytes=_area_bytes(given.snapshot_limit, "--snapshot-limit", devices),
        optimizer_preimages=given.optimizer_preimages,
        exact=given.exact,
        collectives=given.collectives,
        validate_every=given.validate_every,
        hang_timeout_s=parse_seconds(given.hang_timeout, "--hang-timeout"),
        persist=_persistence(given),
        cpu_image_every_s=_image_interval(given),
        metrics=given.metrics,
        membership=membership_of(given),
        adoption_grace_s=parse_seconds(given.adoption_grace, "--adoption-grace"),
    )


def _image_interval(given: ProxydOptions) -> float:
    """Seconds; raises BadInput."""
    if not given.cpu_image_every:
        return 0.0
    if not given.etcd:
        raise BadInput(
            f"--cpu-image-every {given.cpu_image_every} is of no use without --etcd: it is for workers on "
            "other hosts"
        )
    return parse_seconds(given.cpu_image_every, "--cpu-image-every", example="60")


def _area_bytes(text: str, flag: str, devices: DeviceSpec) -> int:
    """The most that an area of a rank's log takes: it has no memory before it is used."""
    if text.strip() != "auto":
        return parse_bytes(text, flag)
    if devices.kind == "cpu":
        return AREA_BYTES
    return max(AREA_BYTES, shutil.disk_usage(SHARED_MEMORY).total // devices.count)


def _persistence(given: ProxydOptions) -> PersistenceSettings | None:
    """Raises BadInput."""
    if not given.persist:
        for field in fields(given):
            value = getattr(given, field.name)
            if field.name in OF_PERSIST and value != field.default:
                flag = f"--{field.name.replace('_', '-')}"
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
    directory = Path(given.persist).absolute()
    check_directory(directory)
    seconds, steps, overhead = _how_often(given)
    return PersistenceSettings(
        directory, seconds, steps, given.persist_slots,
        stays_in_memory=not given.persist_only, writing=writing, overhead=overhead, mirror=_mirror(given),
        keep_runs=given.keep_runs, keeps_log=given.persist_log,
    )  # fmt: skip


def _how_often(given: ProxydOptions) -> tuple[float, int, float]:
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


def _writing(given: ProxydOptions) -> Writing:
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


def _mirror(given: ProxydOptions) -> MirrorSettings | None:
    """Raises BadInput."""
    asked = {"keep_last": given.keep_last, "keep_every": given.keep_every}
    told = {name: number for name, number in asked.items() if number is not None}
    for name, number in told.items():
        flag, least = f"--{name.replace('_', '-')} {number}", int(name == "keep_last")
        if not given.mirror:
            raise BadInput(f"{flag} says what stays at a --mirror, and none was named")
        if number < least:
            raise BadInput(f"{flag} is not possible: {least} or more")
    if not given.mirror:
        return None
    from understudy.recovery.snapshots.remote.second_tier import (
        check_url,  # libraries that are seldom needed
    )

    try:
        check_url(given.mirror)
    except BadInput as problem:
        raise BadInput(f"--mirror {problem}") from problem
    return MirrorSettings(given.mirror, Retention(**told))
