"""What dead proxyds left behind: which of it is ours to adopt, what can go, and what must be left alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from understudy.protos import control_pb2 as pb
from understudy.recovery.config.settings import BadInput, Settings
from understudy.recovery.machine.processes import is_same_process
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY, RuntimeDirectory, abandoned
from understudy.recovery.takeover.journal import JournalError, read

log = structlog.get_logger()


@dataclass(frozen=True)
class Leftovers:
    """Jobs that go on without a proxyd, and the directory in which they do."""

    runtime: RuntimeDirectory
    journal: pb.Journal


def claim_leftovers(settings: Settings, parent: Path = SHARED_MEMORY) -> Leftovers | None:
    """Remove what is dead; answer what one at our socket left alive.  Raises BadInput if it does not fit."""
    ours: Leftovers | None = None
    for runtime in abandoned(parent):
        journal = _journal(runtime)
        if _is_dead(runtime, journal):
            log.warning("removed what a dead proxyd left behind", path=str(runtime.path))
            runtime.remove()
        elif ours is None and journal is not None and journal.socket == str(settings.socket):
            ours = Leftovers(runtime, journal)
        else:
            runtime.release()
    if ours is not None and ours.journal.jobs:
        _check_fit(settings, ours.journal)
    return ours


def remove_leftovers(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what dead proxyds left behind, where no job of theirs lives; answers what was removed."""
    removed: list[Path] = []
    for runtime in abandoned(parent):
        if _is_dead(runtime, _journal(runtime)):
            runtime.remove()
            removed.append(runtime.path)
        else:
            runtime.release()
    return removed


def _is_dead(runtime: RuntimeDirectory, journal: pb.Journal | None) -> bool:
    return not runtime.has_servers() and (journal is None or not _has_people(journal))


def _journal(runtime: RuntimeDirectory) -> pb.Journal | None:
    try:
        return read(runtime.path)
    except JournalError as problem:
        if runtime.has_servers():
            log.error(
                "cannot adopt what a dead proxyd left behind: its journal is unusable, so its device servers "
                "end when their workers have",
                path=str(runtime.path), problem=str(problem),
            )  # fmt: skip
        return None


def _has_people(journal: pb.Journal) -> bool:
    """Whether a launcher or a worker of a job lives."""
    people = [job.launcher for job in journal.jobs if job.HasField("launcher")]
    people += [session.worker for job in journal.jobs for session in job.sessions]
    return any(is_same_process(person.pid, person.start_ticks) for person in people)


def _check_fit(settings: Settings, journal: pb.Journal) -> None:
    ours = f"{settings.devices.kind}:{settings.devices.count}"
    jobs = ", ".join(job.name for job in journal.jobs)
    left = f"a proxyd (pid {journal.proxyd.pid}) that died at {settings.socket} left job {jobs} running"
    if journal.devices != ours:
        raise BadInput(
            f"{left} on --devices {journal.devices}: start with the same to adopt it, not with {ours}"
        )
    if journal.optimizer_preimages != settings.keeps_optimizer_preimages:
        mode = "on" if journal.optimizer_preimages else "off"
        raise BadInput(f"{left} with --optimizer-preimages {mode}: start with the same to adopt it")
    for name, ours in settings.gpu_ways.items():
        if ours and (theirs := getattr(journal, name)) not in ("", ours):
            raise BadInput(f"{left} with --{name} {theirs}: start with the same to adopt it")
