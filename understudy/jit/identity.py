"""Who this process is in its job: what a save is labelled with (paper 001 §3.2)."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from dataclasses import dataclass
from typing import Any

LONGEST_TEXT = 200
"""Of a shard's, a job's, a host's or an attempt's name, in characters."""
LARGEST = 2**53
"""Of a step: JSON's readers in other languages keep no more."""
_MOST_RANKS = 10**6
_NONCE = "understudy.jit/attempt"
UNNAMED = "unnamed"
_DRAWN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


class JitError(RuntimeError):
    """A checkpoint could not be saved, or none can be taken. It is one sentence, which says what to do."""


@dataclass(frozen=True)
class Identity:
    """What tells this rank's saves from all others.

    `shard` names the part of the state that this rank has: any text; its replicas name the same one.
    `attempt` names one start of the whole job: all ranks have the same one, and no other start has it.
    """

    job: str
    shard: str
    rank: int
    world_size: int
    host: str
    attempt: str

    def __post_init__(self) -> None:
        """Raises JitError for what cannot be written down."""
        for name in ("job", "shard", "host", "attempt"):
            if complaint := text_problem(getattr(self, name)):
                raise JitError(f"The {name} of this rank {complaint}; give it another name.")
        if not is_number(self.world_size, _MOST_RANKS) or not is_number(self.rank, _MOST_RANKS):
            raise JitError(f"Rank {self.rank!r:.40} of {self.world_size!r:.40} is no rank of a job.")
        if not self.rank < self.world_size:
            raise JitError(f"Rank {self.rank} is none of the {self.world_size} ranks of this job.")

    @classmethod
    def of(cls, shard: str, job: str | None = None) -> Identity:
        """From torch.distributed if a process group is up, else from a launcher's environment variables.

        Without a name the job is `TORCHELASTIC_RUN_ID` (`torchrun --rdzv-id`), unless the launcher has drawn
        it (`--standalone` draws a UUID at each launch): the next launch is to find what this one saves.
        With a process group its store agrees on what makes the attempt unique; without one it is made of the
        launcher's variables, so that all ranks have the same.
        """
        distributed = _distributed()
        rank = int(distributed.get_rank()) if distributed else _from_environment("RANK", 0)
        world = int(distributed.get_world_size()) if distributed else _from_environment("WORLD_SIZE", 1)
        run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        if job is None:
            job = UNNAMED if run in ("", "none") or _DRAWN.fullmatch(run) else run
        count = _from_environment("TORCHELASTIC_RESTART_COUNT", 0)
        nonce = _agreed(distributed) if distributed else _launchers(world)
        host = "".join(one for one in socket.gethostname() if one.isprintable())[:LONGEST_TEXT]
        return cls(job, shard, rank, world, host or "unknown", f"{count}-of-{world}-{nonce}")


def text_problem(text: object) -> str | None:
    """What is wrong with a name, behind its subject; None for one that can be written down."""
    if not isinstance(text, str):
        return f"is a {type(text).__name__}, not a text"
    if not 0 < len(text) <= LONGEST_TEXT:
        return f"has {len(text)} characters, instead of 1 to {LONGEST_TEXT}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is no valid Unicode"
    return None


def is_number(value: object, most: int = LARGEST) -> bool:
    """A whole number from 0 to `most`; True and False are none."""
    return type(value) is int and 0 <= value <= most


def one_line(text: str) -> str:
    """Of a reason, for people."""
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= 160 else line[:157] + "..."


def shown(text: str) -> str:
    """For people: what a terminal would obey is escaped."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _distributed() -> Any:
    """torch.distributed, if a process group is up."""
    import torch.distributed

    up = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed if up else None


def _agreed(distributed: Any) -> str:
    """The first rank to ask decides; no collective is called."""
    store = distributed.distributed_c10d._get_default_store()
    return str(store.compare_set(_NONCE, "", secrets.token_hex(8)).decode())[:64]


def _launchers(world: int) -> str:
    if world == 1:
        return secrets.token_hex(8)
    variables = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    text = "\n".join(os.environ.get(name, "") for name in variables)
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _from_environment(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise JitError(
            f"The variable {name} is {shown(text)[:40]!r}, which is no number; let the launcher set it."
        )
    return int(text)
