"""What proxyd writes into its runtime directory, so that a successor can adopt its jobs should it die.

A file of one header line, the SHA-256 of the rest, and a `Journal` (protos/journal.proto).  It is replaced as
a whole (write, fsync, rename) and checked when it is read: whatever it says may be wrong, old or foreign.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.job_names import JOB_NAME
from understudy.recovery.base.whole_file import read_whole, write_whole
from understudy.recovery.config.settings import BadInput, parse_devices
from understudy.recovery.drills.fault_table import BY_NAME
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

FILE = "journal"
_HEADER = b"understudy journal 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LARGEST = 64 << 20
_SOCKET = re.compile(r"server-[0-9a-z-]{1,64}\.sock")
_LOG = re.compile(r"rank-[0-9]{1,9}(-[0-9]{1,9})?")
_FAR_LOG = re.compile(r"understudy-\d+-\d+-\d+-\w+/[A-Za-z0-9_-]{1,64}/rank-\d+(-\d+)?")
_MOST_PIDS = 1 << 22
"""PID_MAX_LIMIT of Linux."""


class JournalError(RuntimeError):
    """A journal that cannot be relied on; its text says why."""


def write(runtime: Path, journal: pb.Journal) -> None:
    """Replace the journal of a runtime directory, so that whoever reads it finds the old or the new one."""
    content = journal.SerializeToString()
    write_whole(runtime / FILE, _HEADER + hashlib.sha256(content).digest() + content, synced=True)


def touch(runtime: Path) -> None:
    """A sign of life."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(runtime / FILE)


def last_touched(runtime: Path) -> float:
    """When the proxyd that wrote it was last there, seconds since 1970; raises OSError."""
    return (runtime / FILE).lstat().st_mtime


def read(runtime: Path) -> pb.Journal:
    """The journal of a runtime directory; raises JournalError."""
    try:
        content = read_whole(runtime / FILE, _LARGEST)
    except OSError as problem:
        raise JournalError(f"it cannot be read: {problem.strerror or problem}") from problem
    return parse(content)


def parse(content: bytes) -> pb.Journal:
    """Check and decode; raises JournalError."""
    if not content.startswith(_HEADER):
        raise JournalError("it is not of this version of Understudy")
    digest, body = content[len(_HEADER) :][:_DIGEST_BYTES], content[len(_HEADER) + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != digest:
        raise JournalError("its checksum is wrong")
    journal = pb.Journal()
    try:
        journal.ParseFromString(body)
    except DecodeError as problem:
        raise JournalError(f"it cannot be decoded: {problem}") from problem
    _check(journal)
    return journal


def _check(journal: pb.Journal) -> None:
    try:
        devices = parse_devices(journal.devices).count
    except BadInput as problem:
        raise JournalError(str(problem)) from problem
    _demand(_is_process(journal.proxyd), "it names no proxyd")
    barred = (*journal.fenced, *journal.worn)
    _demand(all(0 <= index < devices for index in barred), "it fences a device that there is not")
    _demand(all(0 <= index < devices for index in journal.draining), "it drains a device that there is not")
    for server in journal.servers:
        _check_server(server)
    _demand_unique((job.name for job in journal.jobs), "job")
    held = [session.device_index for job in journal.jobs for session in job.sessions]
    to = [s.destination for job in journal.jobs for s in job.sessions if s.HasField("destination")]
    _demand_unique([*held, *to], "device with a session")
    for job in journal.jobs:
        _check_job(job, devices)


def _check_job(job: pb.JournaledJob, devices: int) -> None:
    _demand(JOB_NAME.fullmatch(job.name) is not None, f"{job.name[:80]!r} is no name for a job")
    _demand(not job.HasField("launcher") or _is_process(job.launcher), "a launcher is no process")
    for drill in job.drills:
        _demand(drill.drill.kind in BY_NAME and drill.drill.rank >= 0, "it names an unknown drill")
    for one in job.span.given_up:
        _demand(
            1 <= one.process.pid <= _MOST_PIDS and bool(one.host), "it gives up what is no worker of a host"
        )
    _demand_unique((session.rank for session in job.sessions), f"rank of job {job.name}")
    for session in job.sessions:
        _demand(0 <= session.rank < session.world, f"there is no rank {session.rank} of {session.world}")
        _demand(0 <= session.device_index < devices, f"rank {session.rank} holds a device that there is not")
        _demand(
            0 <= session.asked_index < devices, f"rank {session.rank} asked for a device that is not there"
        )
        known = not session.HasField("destination") or 0 <= session.destination < devices
        _demand(known, f"rank {session.rank} moves to a device that there is not")
        _demand(_is_process(session.worker), f"the worker of rank {session.rank} is no process")
        _demand(_is_log(session.directory), f"{session.directory[:80]!r} is no log")
        for durable in session.durable:
            _demand(durable.run.startswith("/"), f"{durable.run[:80]!r} is no directory of stores")
        if session.HasField("server"):  # a rank that has just come from another host has none
            _check_server(session.server)
        if session.HasField("stash"):
            _check_server(session.stash)


def _check_server(server: pb.JournaledServer) -> None:
    _demand(_is_process(server.process), "a device server is no process")
    _demand(
        _SOCKET.fullmatch(server.socket) is not None, f"{server.socket[:80]!r} is no device server's socket"
    )
    try:
        parse_devices(f"{server.device.partition(':')[0]}:1")
    except BadInput as problem:
        raise JournalError(f"a device server of {server.device[:80]!r}") from problem


def _is_log(directory: str) -> bool:
    """In the job's directory, or that of a rank from another host."""
    abroad = directory.removeprefix(f"{SHARED_MEMORY}/")
    return _LOG.fullmatch(directory) is not None or (
        abroad != directory and _FAR_LOG.fullmatch(abroad) is not None
    )


def _is_process(process: pb.Process) -> bool:
    return 1 <= process.pid <= _MOST_PIDS and process.start_ticks > 0


def _demand(holds: bool, complaint: str) -> None:
    if not holds:
        raise JournalError(complaint)


def _demand_unique(names: Iterable[object], what: str) -> None:
    seen: set[object] = set()
    for name in names:
        _demand(name not in seen, f"it names {what} {name} twice")
        seen.add(name)
