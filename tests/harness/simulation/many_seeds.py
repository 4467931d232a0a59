"""Command lines that run many seeds on several processes, count them, and go on where they stopped."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Chunk = dict[str, Any]
FULL = 100_000
"""Seeds of a full run, from 0."""


@dataclass(frozen=True)
class Seeds:
    """Of one simulation; `run_chunk` gets the first of `chunk` seeds, in a process that imports it."""

    name: str
    chunk: int
    run_chunk: Callable[[int], Chunk]
    fingerprint: Callable[[], str]
    full: int = FULL

    def options(self, description: str | None) -> argparse.Namespace:
        """Of the command line."""
        parser = argparse.ArgumentParser(prog=self.name, description=description)
        parser.add_argument("--seed", type=int, help="run and explain this one")
        parser.add_argument("--first", type=int, default=0)
        parser.add_argument("--count", type=int, default=self.full)
        parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
        parser.add_argument(
            "--state", type=Path, default=Path(f"build/{self.name}.json"),
            help="what is done; delete it to restart",
        )  # fmt: skip
        return parser.parse_args()

    def run(self, options: argparse.Namespace) -> list[Chunk]:
        """All chunks that are done then; what fails is printed."""
        code = self.fingerprint()
        chunks = load(options.state, code)
        done = {chunk["first"] for chunk in chunks}
        ends = options.first + options.count
        todo = [first for first in range(options.first, ends, self.chunk) if first not in done]
        options.state.parent.mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            for number, chunk in enumerate(pool.imap_unordered(self.run_chunk, todo), 1):
                chunks.append(chunk)
                options.state.write_text(json.dumps({"code": code, "chunks": chunks}))
                for seed, text in chunk["failing"].items():
                    print(f"--seed {seed}: {text}", flush=True)
                if number % 50 == 0:
                    done_of = f"{number * self.chunk} of {len(todo) * self.chunk}"
                    print(done_of, file=sys.stderr, flush=True)
            pool.close()
            pool.join()  # what they have begun for themselves ends with them
        return chunks

    def is_full(self, chunks: list[Chunk]) -> bool:
        """Whether all seeds of a full run are among them."""
        return {chunk["first"] for chunk in chunks} >= set(range(0, self.full, self.chunk))


def load(path: Path, code: str) -> list[Chunk]:
    """Chunks that were done with this code."""
    state = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(state, dict) or state.get("code") != code:
        return []
    chunks: list[Chunk] = state["chunks"]
    return chunks
