"""Removes stores of former runs of a job: what `--keep-runs` does not keep."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from understudy.recovery.snapshots.stores.catalogue import read_run
from understudy.recovery.snapshots.stores.layout import ORIGIN, logs_of, removable, stores_of
from understudy.recovery.snapshots.stores.retention import LocalRun, superfluous_runs


def remove_old_runs(job: Path, present: str, keep: int, parts_on_other_hosts: bool = False) -> list[str]:
    """Answers the runs that are gone.  Precondition: `present`, a run of the job, holds a complete set.

    `parts_on_other_hosts`: parts of it may lie there, and then those of former runs do, too.  Runs that
    anybody reads or writes stay, and files that are no stores.  Raises OSError.
    """
    folders = [run for run in sorted(job.iterdir()) if run.is_dir() and not run.is_symlink()]
    runs = [_look(run) for run in folders]
    if parts_on_other_hosts and not any(run.name == present and run.complete for run in runs):
        runs = [_look(run, parts_on_other_hosts) for run in folders]
    return [name for name in superfluous_runs(runs, present, keep) if _remove(job / name)]


def _look(run: Path, parts_on_other_hosts: bool = False) -> LocalRun:
    found, here = read_run(run), {file.rank for file in stores_of(run)}
    newest = max((one.time_ns for one in found.sets), default=run.stat().st_mtime_ns)
    is_ours = bool(stores_of(run) or logs_of(run))
    complete = any(one.complete or (parts_on_other_hosts and set(one.parts) == here) for one in found.sets)
    return LocalRun(run.name, newest, complete, is_ours and not found.problems)


def _remove(run: Path) -> bool:
    with removable(run) as free, contextlib.ExitStack() as locks:
        if not free:
            return False
        files = [file.path for file in stores_of(run)]
        for path in files:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            locks.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False  # its writer lives
        beside = [*(file.path for file in logs_of(run)), run / ORIGIN]
        for path in [*files, *beside]:  # a part of a set does not count, whenever this is cut short
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it
            run.rmdir()
        return True
