"""Turns a stored set into a checkpoint that scripts load: the only part of `recovery` that imports PyTorch.

    OUT/model.pt, model-1.pt, …   state_dict of each module that was trained     (--format torch)
    OUT/optimizer.pt, …           state_dict of each optimizer
    OUT/scheduler.pt, …           state_dict of each learning-rate scheduler
    OUT/data.json                 how far each rank had read its DataLoaders, and the state of our sampler
    OUT/snapshot.json             of which job and step, and what is not in it

With `--format dcp` the same lies in one torch.distributed.checkpoint directory, as {"model": …,
"optimizer": …}; with `--format safetensors` modules are .safetensors files.  Tensors of which each rank has a
block are put together.  Ranks whose state differs otherwise get a directory each.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from understudy.recovery.snapshots.export.whole import Block, NotWhole, put_together
from understudy.recovery.snapshots.restore.reading import Damaged, SetReader
from understudy.recovery.snapshots.stores.catalogue import StoredSet
from understudy.recovery.snapshots.writing.description import (
    Description,
    Omitted,
    Shard,
    TensorPlace,
    Undescribed,
    read_description,
)

NOT_INCLUDED = "random states of Python, and other objects"
_DTYPE = re.compile(r"[a-z0-9_]{1,40}")


@dataclass(frozen=True)
class Checkpoint:
    """What one rank's script would load."""

    models: tuple[Mapping[str, Any], ...]
    optimizers: tuple[Mapping[str, Any], ...]
    schedulers: tuple[Mapping[str, Any], ...]
    omitted: tuple[str, ...]
    """What could not be had, a sentence each."""


class RankState:
    """Tensors of one rank's part."""

    def __init__(self, reader: SetReader, rank: int, all_ranks: Mapping[int, RankState]) -> None:
        """`all_ranks`: where the other blocks of a tensor are.

        Raises Undescribed, Damaged, OSError or StoreError.
        """
        self._reader, self._rank = reader, rank
        self.description: Description = read_description(reader.parts[rank].description())
        self._all_ranks = all_ranks
        self._contents: dict[int, bytearray] = {}
        self._omitted: list[str] = []

    def checkpoint(self) -> Checkpoint:
        """Raises Damaged, OSError or StoreError."""
        described = self.description
        models = tuple(
            self._mapping(module.class_name, module.state, "", ("modules", number))
            for number, module in enumerate(described.modules)
        )
        optimizers = tuple(
            {
                "state": {
                    number: self._mapping(
                        optimizer.class_name, values, f"state of parameter {number}, ",
                        ("optimizers", index, number),
                    )
                    for number, values in sorted(optimizer.state.items())
                },
                "param_groups": [
                    self._mapping(optimizer.class_name, group.options, "")
                    | {"params": list(group.parameters)}
                    for group in optimizer.groups
                ],
            }
            for index, optimizer in enumerate(described.optimizers)
        )  # fmt: skip
        schedulers = tuple(self._mapping(one.class_name, one.state, "") for one in described.schedulers)
        return Checkpoint(models, optimizers, schedulers, tuple(self._omitted))

    def fingerprint(self) -> str:
        """Equal for ranks whose checkpoints are equal."""
        part = self._reader.parts[self._rank]

        def plain(value: Any) -> Any:
            if isinstance(value, TensorPlace):
                if value.shard is not None:  # put together, it is the same for all
                    return [value.dtype, value.shard.of, value.shard.ranks]
                row = part.buffers.get(value.handle)
                where = [row.digest, row.bytes] if row else value.content.hex()
                return [value.dtype, value.size, value.stride, where, value.offset]
            return str(value)

        described = self.description
        return json.dumps(
            [
                [[m.class_name, {n: plain(v) for n, v in m.state.items()}] for m in described.modules],
                [
                    [
                        o.class_name,
                        [[{k: plain(v) for k, v in g.options.items()}, g.parameters] for g in o.groups],
                        {n: {k: plain(v) for k, v in values.items()} for n, values in o.state.items()},
                    ]
                    for o in described.optimizers
                ],
                [[d.class_name, {n: plain(v) for n, v in d.state.items()}] for d in described.schedulers],
            ],
            sort_keys=True,
        )

    def _mapping(
        self, owner: str, values: Mapping[str, Any], what: str, path: tuple[Any, ...] = ()
    ) -> dict[str, Any]:
        """`path`: where other ranks' descriptions have the same mapping."""
        found = {}
        for name, value in values.items():
            if isinstance(value, Omitted):
                self._omitted.append(f"{owner}: {what}{name} is {value.why}")
            elif not isinstance(value, TensorPlace) or value.shard is None:
                try:
                    found[name] = self._filled(value)
                except NotWhole as problem:
                    self._omitted.append(f"{owner}: {what}{name} holds {problem}")
            else:
                try:
                    found[name] = self._whole(value.shard, (*path, name))
                except NotWhole as problem:
                    self._omitted.append(f"{owner}: {what}{name} lies on several ranks, {problem}")
        return found

    def _filled(self, value: Any) -> Any:
        """A value with its tensors; raises NotWhole if it is not all there, or what _tensor() raises."""
        if isinstance(value, Omitted):
            raise NotWhole(value.why)
        if isinstance(value, TensorPlace):
            if value.shard is not None:
                raise NotWhole("a block of a tensor")
            return self._tensor(value)
        if isinstance(value, dict):  # a Counter, too
            return type(value)({key: self._filled(item) for key, item in value.items()})
        if isinstance(value, (list, tuple)):
            return type(value)(self._filled(item) for item in value)
        return value

    def _whole(self, shard: Shard, path: tuple[Any, ...]) -> torch.Tensor:
        """Raises NotWhole, Damaged, OSError or StoreError."""
        blocks = []
        for rank in shard.ranks:
            state = self._all_ranks.get(rank)
            place = state.description.find(path) if state is not None else None
            if state is None or not isinstance(place, TensorPlace) or place.shard is None:
                raise NotWhole(f"and rank {rank} names no block of it")
            if (place.shard.of, place.shard.ranks) != (shard.of, shard.ranks):
                raise NotWhole(f"and rank {rank} has a block of another one")
            blocks.append(Block(place.shard.at, state._tensor(place)))
        return put_together(shard.of, blocks)

    def _tensor(self, place: TensorPlace) -> torch.Tensor:
        dtype = getattr(torch, place.dtype, None) if _DTYPE.fullmatch(place.dtype) else None
        if not isinstance(dtype, torch.dtype):
            raise Damaged(f"there is no element type {place.dtype[:40]!r}")
        if 0 in place.size:
            return torch.empty(place.size, dtype=dtype)
        content = bytearray(place.content) if place.handle == 0 else self._content(place.handle)
        span = 1 + sum((count - 1) * step for count, step in zip(place.size, place.stride, strict=True))
        if place.offset + span * dtype.itemsize > len(content):
            raise Damaged(f"a tensor of size {place.size} lies outside its buffer")
        if place.offset % dtype.itemsize:
            content, offset = content[place.offset :], 0
        else:
            offset = place.offset
        flat = torch.frombuffer(content, dtype=dtype, count=span, offset=offset)
        return flat.as_strided(place.size, place.stride).clone()

    def _content(self, handle: int) -> bytearray:
        if handle not in self._contents:
            self._contents[handle] = bytearray(self._reader.buffer(self._rank, handle))
        return self._contents[handle]


def export(stored: StoredSet, out: Path, form: str) -> list[str]:
    """Writes a complete set into the new directory `out`; answers what could not be had, a sentence each.

    Raises Undescribed, Damaged, OSError or StoreError; nothing is left at `out` then.
    """
    half_made = out.with_name(out.name + ".new")
    half_made.mkdir(parents=True)
    try:
        with SetReader(stored) as reader:
            for part in reader.parts.values():
                part.read_ahead()
            by_rank: dict[int, RankState] = {}
            for number, rank in enumerate(sorted(reader.parts)):
                by_rank[number] = RankState(reader, rank, by_rank)
            states = list(by_rank.values())
            alike = len({state.fingerprint() for state in states}) == 1
            omitted: list[str] = []
            for rank, state in enumerate(states[:1] if alike else states):
                folder = half_made if alike else half_made / f"rank-{rank}"
                folder.mkdir(exist_ok=True)
                checkpoint = state.checkpoint()
                if not checkpoint.models and not checkpoint.optimizers:
                    raise Undescribed("its worker knew of no module that an optimizer trains")
                _WRITERS[form](checkpoint, folder)
                omitted += (
                    checkpoint.omitted if alike else [f"rank {rank}: {one}" for one in checkpoint.omitted]
                )
        about = {
            "job": stored.job, "run": stored.run, "serial": stored.serial, "step": stored.step,
            "ranks": stored.world, "format": form, "one_for_all_ranks": alike,
            "written": datetime.fromtimestamp(stored.time_ns / 1e9, UTC).isoformat(),
            "omitted": omitted, "not_included": NOT_INCLUDED,
        }  # fmt: skip
        data = {
            "step": stored.step,
            "ranks": [[one.document() for one in state.description.data] for state in states],
        }
        (half_made / "data.json").write_text(json.dumps(data, indent=2) + "\n")
        (half_made / "snapshot.json").write_text(json.dumps(about, indent=2) + "\n")
        half_made.rename(out)
    except BaseException:
        shutil.rmtree(half_made, ignore_errors=True)
        raise
    return omitted


def _write_torch(checkpoint: Checkpoint, folder: Path) -> None:
    for name, state in _files(checkpoint):
        torch.save(state, folder / f"{name}.pt")


def _write_safetensors(checkpoint: Checkpoint, folder: Path) -> None:
    from safetensors.torch import save_file

    for number, model in enumerate(checkpoint.models):
        tensors = {name: value.contiguous() for name, value in model.items() if torch.is_tensor(value)}
        save_file(tensors, folder / f"{_numbered('model', number)}.safetensors")
    for name, state in _files(checkpoint)[len(checkpoint.models) :]:
        torch.save(state, folder / f"{name}.pt")


def _write_dcp(checkpoint: Checkpoint, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(_files(checkpoint)), checkpoint_id=folder / "checkpoint", no_dist=True)


def _files(checkpoint: Checkpoint) -> list[tuple[str, Mapping[str, Any]]]:
    models = [(_numbered("model", number), state) for number, state in enumerate(checkpoint.models)]
    optimizers = [(_numbered("optimizer", n), state) for n, state in enumerate(checkpoint.optimizers)]
    schedulers = [(_numbered("scheduler", n), state) for n, state in enumerate(checkpoint.schedulers)]
    return models + optimizers + schedulers


def _numbered(name: str, number: int) -> str:
    return f"{name}-{number}" if number else name


_WRITERS = {"torch": _write_torch, "dcp": _write_dcp, "safetensors": _write_safetensors}
