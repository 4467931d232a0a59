"""A campaign, as its YAML file has it: suites x variants x seeds, one global batch (paper 002 §5.3)."""

from __future__ import annotations

import shlex
import string
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from understudy.campaigns.planning.schedules import Schedule, Strict, Undisturbed
from understudy.campaigns.planning.variants import REFERENCE, VARIANTS, Launch

DATA = ("sources", "digits", "mnist", "text")
MODELS = ("gpt", "convnet", "mlp")
FITS = {"gpt": ("sources", "text"), "convnet": ("digits", "mnist"), "mlp": ("digits", "mnist")}
COMMANDS_VARIANTS = ("bare", "transparent", "transparent+persist")
"""For a user's own command, of which nobody knows how it keeps its state."""
FILLED_IN = ("steps", "losses", "ranks", "seed", "device")
"""In such a command."""


def _variant(name: str) -> str:
    if name not in VARIANTS:
        raise ValueError(f"{name!r} is no variant: there are {', '.join(VARIANTS)}")
    return name


def _variants(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        _variant(name)
    if len(set(names)) != len(names):
        raise ValueError("a variant is named twice")
    return names


def _can_be_filled_in(suite: str, command: str) -> None:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(command) if name is not None}
        shlex.split(command)
    except ValueError as problem:
        raise ValueError(f"the command of {suite} cannot be filled in: {problem}") from None
    if names - set(FILLED_IN):
        known = ", ".join(f"{{{name}}}" for name in FILLED_IN)
        raise ValueError(
            f"the command of {suite} has {{{min(names - set(FILLED_IN))}}}; what can be filled in is {known}"
        )


class Suite(Strict):
    """One training under one schedule of faults. `command` instead of data and model: the user's own."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.+-]{0,60}$")
    data: Literal["sources", "digits", "mnist", "text"] | None = None
    model: Literal["gpt", "convnet", "mlp"] | None = None
    command: str = ""
    schedule: Schedule
    variants: tuple[str, ...] = ()
    """Empty: the campaign's."""
    checkpoint_every: int | None = Field(None, ge=1)
    max_in_flight: int | None = Field(None, ge=1, le=64)
    storage: Literal["disk", "tmpfs"] | None = None

    _known_variants = field_validator("variants")(_variants)

    @model_validator(mode="after")
    def _one_training(self) -> Suite:
        if self.command:
            if self.data or self.model:
                raise ValueError(f"{self.name} has a command, and data or a model besides")
            for needed in ("{steps}", "{losses}"):
                if needed not in self.command:
                    raise ValueError(f"the command of {self.name} lacks {needed}, to be filled in")
            _can_be_filled_in(self.name, self.command)
        elif self.data is None or self.model is None:
            raise ValueError(f"{self.name} needs data and a model, or a command")
        elif self.data not in FITS[self.model]:
            raise ValueError(f"{self.name}: {self.model} learns from {' or '.join(FITS[self.model])}")
        return self

    @property
    def training(self) -> str:
        """What is trained: suites that share it share their undisturbed runs."""
        return self.command or f"{self.data}-{self.model}"


class Campaign(Strict):
    """All of it. Times in seconds."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    ranks: int = Field(2, ge=1, le=16)
    global_batch: int = Field(ge=1)
    steps: int = Field(ge=4, le=1_000_000)
    checkpoint_every: int = Field(ge=1)
    max_in_flight: int = Field(4, ge=1, le=64)
    storage: Literal["disk", "tmpfs"] = "disk"
    collective_timeout_s: float = Field(10.0, gt=0)
    time_limit_s: float = Field(300.0, gt=0)
    """For one run."""
    restarts: int = Field(20, ge=0)
    """So often the supervisor begins again (paper 002 §4.7: "policy limit")."""
    text: Path | None = None
    mnist: Path | None = None
    """The file of text and the folder of MNIST's test images, where a suite has them."""
    suites: tuple[Suite, ...] = Field(min_length=1)
    variants: tuple[str, ...] = Field(min_length=1)
    undisturbed: tuple[str, ...] = (REFERENCE, "blocking", "transparent")
    """Run without faults besides: so the price of checkpoints and that of restarts are two numbers."""

    _known_variants = field_validator("variants", "undisturbed")(_variants)

    @model_validator(mode="after")
    def _makes_sense(self) -> Campaign:
        if self.global_batch % self.ranks:
            raise ValueError(f"{self.ranks} ranks do not divide a global batch of {self.global_batch}")
        if len({suite.name for suite in self.suites}) != len(self.suites):
            raise ValueError("two suites have one name")
        if REFERENCE not in self.undisturbed:
            raise ValueError(f"undisturbed lacks {REFERENCE}, which all others are compared with")
        for suite in self.suites:
            self._check(suite)
        return self

    def _check(self, suite: Suite) -> None:
        for seed in self.seeds:
            for fault in suite.schedule.faults(self.steps, self.ranks, seed):
                if fault.step > self.steps:
                    raise ValueError(f"{suite.name}: {fault} comes behind the last step, {self.steps}")
                if fault.rank >= self.ranks:
                    raise ValueError(f"{suite.name}: {fault} is of no rank: there are {self.ranks}")
        if suite.schedule.kind == "resize" and (self.ranks < 2 or self.global_batch % (self.ranks - 1)):
            raise ValueError(
                f"{suite.name}: {self.ranks - 1} ranks do not divide a global batch of {self.global_batch}"
            )
        self._check_places(suite)
        if suite.command:
            for name in self.variants_of(suite):
                if name not in COMMANDS_VARIANTS:
                    known = ", ".join(COMMANDS_VARIANTS)
                    raise ValueError(f"{suite.name}: a command of one's own runs as {known}, not as {name}")
        if suite.data == "text" and self.text is None:
            raise ValueError(f"{suite.name} learns from a text, and the campaign has no text: FILE")
        if suite.data == "mnist" and self.mnist is None:
            raise ValueError(f"{suite.name} learns MNIST, and the campaign has no mnist: FOLDER")

    def _check_places(self, suite: Suite) -> None:
        drawn = (suite.schedule.faults(self.steps, self.ranks, seed) for seed in self.seeds)
        placed = any(one.place for faults in drawn for one in faults)
        proxied = any(VARIANTS[name].launch is Launch.PROXY for name in self.variants_of(suite))
        if proxied and placed and "transparent" not in self.undisturbed:
            raise ValueError(
                f"{suite.name}: undisturbed lacks transparent, which tells how many calls a step has: by "
                "them places of faults are reckoned"
            )

    def variants_of(self, suite: Suite) -> tuple[str, ...]:
        return suite.variants or self.variants

    def every(self, suite: Suite) -> int:
        """Steps from one checkpoint to the next."""
        return suite.checkpoint_every or self.checkpoint_every


def is_undisturbed(suite: Suite) -> bool:
    return isinstance(suite.schedule, Undisturbed)
