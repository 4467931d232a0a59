"""What a run's ranks have come to, beside the undisturbed run of the same training and seed: bits."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.campaigns.programs.ending import FINAL
from understudy.campaigns.programs.plan import NAME, Plan
from understudy.campaigns.results.records import Checkpoints, Comparison, Samples
from understudy.campaigns.results.stamps import Stamp
from understudy.data import accounting, check, judgement
from understudy.data import checkpoint_files as files

AT_CHECKPOINTS = "parameters.pt"
"""Of an undisturbed run with checkpoints: its parameters at each, by step."""


def losses_of(stamps: Sequence[Stamp]) -> dict[tuple[int, int], str]:
    """Bits by rank and step; of a step that was done again, the last."""
    return {(one.rank, one.step): one.note for one in stamps if one.what == "step"}


def parameters_of(stamps: Sequence[Stamp]) -> dict[int, str]:
    """The digest of each rank's parameters at the end."""
    return {one.rank: one.note for one in stamps if one.what == "parameters"}


def compared(
    folder: Path,
    store: Path,
    stamps: Sequence[Stamp],
    reference: Path,
    stamps_there: Sequence[Stamp],
    kept_there: Path | None = None,
) -> Comparison:
    """`reference`: the folder of the undisturbed run; `kept_there`: of the one that has AT_CHECKPOINTS.

    Distances only where parameters differ.
    """
    ours, theirs = losses_of(stamps), losses_of(stamps_there)
    mine, known = parameters_of(stamps), parameters_of(stamps_there)
    equal = bool(mine) and all(digest == known.get(rank) for rank, digest in mine.items())
    both = [step for rank, step in ours if rank == 0 and (0, step) in theirs]
    difference = sum(abs(number(ours[0, step]) - number(theirs[0, step])) for step in both)
    return Comparison(
        parameters_equal=equal,
        losses_equal=ours == theirs,
        loss_difference=difference / max(1, len(both)),
        distances={} if equal else distances(folder, store, reference, kept_there),
    )


def number(bits: str) -> float:
    """A loss, from the hexadecimal pattern of its 32 bits."""
    value: float = struct.unpack(">f", bytes.fromhex(bits))[0]
    return value


def distances(folder: Path, store: Path, reference: Path, kept_there: Path | None) -> dict[int, float]:
    """L2, by step; of the last one the parameters at the end."""
    import torch

    found = {}
    if kept_there is not None and (kept_there / AT_CHECKPOINTS).exists():
        theirs = torch.load(kept_there / AT_CHECKPOINTS, weights_only=True)
        for step, parameters in at_checkpoints(store).items():
            if step in theirs:
                found[step] = _distance(parameters, theirs[step])
    if (folder / FINAL).exists() and (reference / FINAL).exists():
        ours = torch.load(folder / FINAL, weights_only=True)
        found[Plan.read(folder / NAME).steps] = _distance(
            ours, torch.load(reference / FINAL, weights_only=True)
        )
    return found


def at_checkpoints(store: Path) -> dict[int, dict[str, Any]]:
    """Parameters in each checkpoint of a StatePack that is whole, by step."""
    found = {}
    for place in files.places(store) if store.is_dir() else ():
        try:
            state = files.read_payload(store, place, files.read_part(store, place, 0))
        except files.NotWhole:
            continue
        found[place.step] = {
            name: one for name, one in state["parts"]["model"].items() if one.is_floating_point()
        }
    return found


def _distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    total = sum(
        float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours if name in theirs
    )
    return float(total**0.5)


def samples_of(folder: Path, reference: Path | None) -> Samples:
    """Whether exactly the samples that it should have were used (paper 002, eqs. 2 and 5)."""
    try:
        run = check.read_run(folder)
        against: accounting.Run | None = None if reference is None else check.read_run(reference)
        verdict = judgement.judge(run, against)
    except (ValueError, OSError) as problem:
        return Samples(exact=False, sentence=str(problem))
    if verdict.exact:
        return Samples(exact=True, sentence=f"duplicates = missing = extra = 0; {run.redone} steps redone")
    return Samples(exact=False, sentence=str(verdict.offences[0]))


def checkpoints_of(store: Path) -> Checkpoints:
    """Of rank 0's lines (paper 002, Table 1)."""
    try:
        lines = (store / "checkpoints-rank00000.jsonl").read_text().splitlines()
    except OSError:
        return Checkpoints()
    found: list[Mapping[str, Any]] = [json.loads(line) for line in lines]

    def total(name: str) -> float:
        return float(sum(line.get(name) or 0 for line in found))

    return Checkpoints(
        count=len(found),
        snapshot=total("snapshot"),
        write=total("write"),
        stall=total("stall"),
        enqueue=total("enqueue"),
        backpressure=total("backpressure"),
        bytes=int(total("bytes")),
    )
