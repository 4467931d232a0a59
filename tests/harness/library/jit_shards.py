"""Directories of shards, for tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from understudy.jit.identity import Identity
from understudy.jit.storage import Choice, ShardDirectory


def identity(
    rank: int = 0, world: int = 2, shard: str | None = None, attempt: str = "first", job: str = "job"
) -> Identity:
    return Identity(job, f"s{rank}" if shard is None else shard, rank, world, f"host-{rank}", attempt)


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content)

    return write


def nothing(path: Path) -> None:
    raise AssertionError(f"{path} is not to be written")


def opened(
    directory: Path, world: int = 2, attempt: str = "first", shards: dict[int, str] | None = None
) -> list[ShardDirectory]:
    """All ranks of an attempt, announced."""
    ranks = [
        ShardDirectory(directory, identity(rank, world, (shards or {}).get(rank), attempt))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.announce()
    return ranks


def complete(directory: Path, *steps: int, world: int = 2, attempt: str = "first") -> list[ShardDirectory]:
    """Each step saved by all ranks of an attempt, each its own shard."""
    ranks = opened(directory, world, attempt)
    for step in steps:
        for number, rank in enumerate(ranks):
            rank.save(step, text(f"s{number} of {step}"), "a test")
    return ranks


def chosen(directory: Path, rank: int = 0, world: int = 2, attempt: str = "next") -> Choice | None:
    return ShardDirectory(directory, identity(rank, world, attempt=attempt)).choose()


def taken(directory: Path, rank: int = 0) -> tuple[int, str] | None:
    """Step and content of what the next attempt resumes from."""
    choice = chosen(directory, rank)
    return None if choice is None else (choice.step, choice.path.read_text())


def folders(directory: Path, step: int | None = None) -> list[Path]:
    return sorted(directory.glob("step-*" if step is None else f"step-{step}.*"))


def hidden(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]
