"""Writes down which samples each rank has used at each step (paper 002 §4.1, §4.9).

One file for each rank, a line for each step, appended: `samples-rank00000.jsonl`. A line begins each attempt,
that is, each start of the run on these files; a step that is redone after a restart is written again, under
the later attempt. `python -m understudy.data check RUN` judges them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .checkpoint_files import make_folder
from .ranks import Ranks
from .records import Beginning, SampleId, Used, multiset_hash, parse
from .sampler import ResumableSampler

_NAME = re.compile(r"samples-rank(\d{5,9})\.jsonl")


def log_name(rank: int) -> str:
    return f"samples-rank{rank:05d}.jsonl"


def logs(directory: Path) -> list[Path]:
    """The files of all ranks that there ever were."""
    return (
        sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
        if directory.is_dir()
        else []
    )


class SampleLog:
    """The log of this rank.

        log = SampleLog("run", sampler)
        for step in sampler.steps(loader):
            ...
            log.record(step.epoch, step.step, step.indices)

    With `own_ids=True` the ids are what the data set yields, numbers or texts: then what actually arrived is
    judged, and not only what was asked for. With `keep_ids=False` a line has count and hash alone (paper
    §4.1).

    A line is in the kernel's hands when `record` returns: it outlives the process. `sync` makes all lines
    outlive the machine; call it before a checkpoint is taken, so that no step counts whose samples were not
    written down.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        sampler: ResumableSampler,
        *,
        own_ids: bool = False,
        keep_ids: bool = True,
        attempt: int | None = None,
        group: Any = None,
    ) -> None:
        """All ranks make theirs together, and agree on the attempt: one more than any in the files."""
        folder = Path(directory)
        make_folder(folder)
        if attempt is None:
            ranks = Ranks.of(group) if sampler.world_size > 1 else Ranks(0, 1)
            attempt = max(ranks.gather(latest_attempt(folder))) + 1
        self.attempt = attempt
        self._keep_ids = keep_ids
        path = folder / log_name(sampler.rank)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # torn as the run before was killed
            self._append("")
        self._append(Beginning(attempt, sampler.rank, sampler.world_size, sampler.plan, own_ids).line())

    def record(self, epoch: int, step: int, ids: Iterable[Any]) -> None:
        """The ids that this rank has used in a step: numbers (tensors, too) or texts."""
        plain = list(_plain(ids))
        kept = plain if self._keep_ids else None
        self._append(Used(epoch, step, len(plain), multiset_hash(plain), kept).line())

    def sync(self) -> None:
        """Make durable what has been recorded."""
        os.fsync(self._file)

    def close(self) -> None:
        """Further calls do nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: str) -> None:
        data = line.encode() + b"\n"
        while data:  # a write may be cut short by a full disk, whose error the next one raises
            data = data[os.write(self._file, data) :]


def latest_attempt(directory: Path) -> int:
    """The highest number in the files; 0 where there is none."""
    highest = 0
    for path in logs(directory):
        with path.open("rb") as file:
            for line in file:
                if b'"attempt"' in line[:40]:
                    try:
                        found = parse(line)
                    except ValueError:
                        continue
                    highest = max(highest, found.attempt if isinstance(found, Beginning) else 0)
    return highest


def _plain(ids: Iterable[Any]) -> Iterator[SampleId]:
    for one in ids:
        value = one.item() if hasattr(one, "item") else one
        if type(value) not in (int, str):
            raise ValueError(
                f"The sample id {value!r} is a {type(value).__name__}; ids are whole numbers or texts."
            )
        yield value
