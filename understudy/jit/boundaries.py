"""Where a step ends, and what of its end is kept so that a save in the middle of the next one describes it.

Parameters and optimizer state change inside `optimizer.step()` alone, so from one boundary to the next they
are those of the last completed step. Generators of random numbers and statistics of normalisation move on in
the forward pass: they are copied at each boundary, and put back before a save.

    SETTLED     forward, backward: a save describes the last completed step
    WAITING     in front of `optimizer.step()`, where a job with several shards waits for all ranks (gate.py)
    UPDATING    inside `optimizer.step()`: half of the parameters are new
    UNSETTLED   behind it, where schedulers and counters step: until the first forward pass, or, in a script
                that calls `jit.boundary()`, until that call
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .buffers import Buffers
from .generators import Generators

_OPTIMIZER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


class Zone(enum.Enum):
    """Where the main thread is in a step."""

    SETTLED = "in a forward or backward pass"
    WAITING = "in front of the optimizer's step, waiting for the other ranks"
    UPDATING = "inside an optimizer's step"
    UNSETTLED = "between the optimizer's step and the end of the training step"


@dataclass(frozen=True)
class Obstacle:
    """Why the state of this moment is not that of a step's end."""

    sentence: str
    passes: bool
    """Whether a training that goes on comes to a place without it."""


class Devices(Protocol):
    """Where work is only enqueued by the script, and done later: cuda_watch.py."""

    def settle(self) -> None:
        """Wait for collectives that are under way."""

    def boundary(self) -> None:
        """What was enqueued so far is the end of a step."""


class Boundary:
    """Counts steps and knows the zone. Its hooks are called by the thread that trains.

    `on_arrival()` is called wherever a save may have been waited for, and before parameters change.
    `on_generators(step, generators)` is called at each boundary, and when a backward pass begins: then with
    those that this rank will have at the end of `step` as far as anybody can know, because a rank may be
    killed behind its last collective and in front of its own boundary. `on_optimizer(optimizer)` is called
    when one is about to step for the first time. `pass_gate()`, if given, is called once in each step of a
    script that calls `jit.boundary()`, before anything that it saves is changed.
    """

    def __init__(
        self,
        on_arrival: Callable[[], None],
        on_generators: Callable[[int, Generators], None],
        say: Callable[[str], None],
        on_optimizer: Callable[[Any], object] | None = None,
        devices: Devices | None = None,
    ) -> None:
        self.zone = Zone.UNSETTLED
        self.pass_gate: Callable[[], None] | None = None
        self.explicit = False
        self.step = 0
        """Steps completed since the training began, those before a restart included."""
        self.generators: Generators | None = None
        """At the last boundary; None before the first one of this process."""
        self._begun_at = 0
        self._on_arrival, self._on_generators, self._say = on_arrival, on_generators, say
        self._on_optimizer = on_optimizer
        self._devices = devices
        self._passed = False
        """The gate, in this step."""
        self._inside: list[int] = []
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._told_of_several = self._told_of_shards = False
        self._buffers = Buffers()
        self._outermost: weakref.ref[nn.Module] | None = None
        self._forward: Any = None
        self._on_module: Any = None
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Hooks that PyTorch calls for every optimizer, and for the first module of a step."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._behind_optimizer),
        ]
        self._await_forward()

    def remove(self) -> None:
        """All hooks."""
        for hook in (*self._hooks, self._forward, self._on_module):
            if hook is not None:
                hook.remove()
        self._hooks, self._forward, self._on_module = [], None, None

    @property
    def done_here(self) -> int:
        """Steps completed by this process."""
        return self.step - self._begun_at

    def go_on_from(self, step: int) -> None:
        """The count goes on there: the state of that step is what the script is about to load."""
        self.step = self._begun_at = step

    def declare(self) -> None:
        """The script says: a step ends here. From the first call on, nothing else is taken for an end."""
        self._settle()
        if not self.explicit:
            self.explicit = True
            self.step = self._begun_at  # what optimizers counted in the first step is this very step
        else:
            self._through_gate()  # in a step without an optimizer's: the other ranks wait for this one
        self._complete()
        self.zone = Zone.SETTLED
        self._on_arrival()

    def keep_generators(self) -> None:
        """What was drawn since the last boundary belongs to it: a save puts back what is now.

        Nothing happens before the first boundary of this process, or inside an optimizer's step.
        """
        if self.generators is None or self.zone is not Zone.SETTLED:
            return
        self._on_arrival()
        self.generators = Generators.now()
        self._on_generators(self.step, self.generators)

    def obstacle(self) -> Obstacle | None:
        """Why nothing can be saved at this moment; None if the state is that of the last completed step."""
        if self.generators is None:
            return Obstacle("no step was completed since the start, whose state is the newest", False)
        if self._several() and not self.explicit:
            return Obstacle(
                "several optimizers step in turn, and nobody knows behind which of them a step ends; call "
                "jit.boundary() at the end of each step",
                False,
            )
        if self.zone is Zone.WAITING:
            return Obstacle("the ranks wait for one another in front of the optimizer's step", True)
        if self.zone is Zone.UPDATING:
            return Obstacle("the step is half done, because the fault lies inside an optimizer's step", True)
        if self.zone is Zone.UNSETTLED and self.explicit:
            return Obstacle(
                "the fault lies between the optimizer's step and jit.boundary(); call that directly behind "
                "what a step changes, in front of any collective",
                True,
            )
        if self.zone is Zone.UNSETTLED:
            return Obstacle(
                "the fault lies between the optimizer's step and the next forward pass, where schedulers and "
                "counters step; call jit.boundary() directly behind these",
                True,
            )
        return None

    def put_back(self) -> str | None:
        """Generators and statistics become those of the last boundary. Returns what could not be, or None."""
        assert self.generators is not None, "there is no save before the first boundary"
        self.generators.put_back()
        return self._buffers.put_back()

    def aside(self) -> Callable[[], None]:
        """What `put_back` is about to change; calling the answer makes it so again: this step goes on."""
        generators, buffers = Generators.now(), self._buffers.aside()

        def take_up() -> None:
            generators.put_back()
            buffers()

        return take_up

    def moved(self) -> bool:
        """Whether somebody has drawn numbers, or changed statistics, since `put_back`."""
        return Generators.now() != self.generators or self._buffers.moved()

    def _complete(self) -> None:
        self._passed = False
        self.step += 1
        self.generators = Generators.now()
        self._buffers.copy()
        if self._devices is not None:
            self._devices.boundary()
        self._on_generators(self.step, self.generators)
        self._await_forward()

    def _settle(self) -> None:
        """What a device has yet to do it has done, or this thread hangs here, in front of a change."""
        if self._devices is not None:
            self._devices.settle()

    def _before_optimizer(
        self, optimizer: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """With a closure the forward and backward pass lie inside `step`, in front of any change."""
        named = named or {}
        closure = arguments[1] if len(arguments) > 1 else named.get("closure")
        if closure is None or self._inside or not _calls_closure_first(optimizer):
            self._update(optimizer)
            return None

        def passes_and_then_update() -> Any:
            result = closure()
            if id(optimizer) not in self._inside:  # LBFGS calls it more than once
                self._update(optimizer)
            return result

        if len(arguments) > 1:
            return (arguments[0], passes_and_then_update, *arguments[2:]), named
        return arguments, {**named, "closure": passes_and_then_update}

    def _update(self, optimizer: Any) -> None:
        self._settle()
        self._on_arrival()  # a thread that saves must not see parameters change
        key = id(optimizer)
        if self._inside:
            self._forget_what_has_raised({key: -1})  # this entry is not among them yet
        if not self._inside:
            self._note(optimizer)
            if self.explicit:
                self._through_gate()
        self._inside.append(key)
        self.zone = Zone.UPDATING

    def _behind_optimizer(self, optimizer: Any, *_: object) -> None:
        if self._inside == [id(optimizer)]:
            self._inside = []
        elif self._inside:
            self._forget_what_has_raised({id(optimizer): -1})  # this one ends
        if self._inside:  # one optimizer inside another, or `super().step()`
            return
        self.zone = Zone.UNSETTLED
        if not self.explicit:
            self._complete()

    def _forget_what_has_raised(self, other: dict[int, int]) -> None:
        """A step that raises has no hook behind it. `other`: id -> entries more than steps that run."""
        left = Counter(_steps_that_run())
        left.update(other)
        kept = []
        for key in self._inside:
            if left[key] > 0:
                left[key] -= 1
                kept.append(key)
        self._inside = kept

    def _through_gate(self) -> None:
        """Once in a step, and not before it is known that the script calls `jit.boundary()`: in the first
        step what it has loaded is still there, as a step that all shards have."""
        if self.pass_gate is None or self._passed:
            return
        self._passed = True
        before, self.zone = self.zone, Zone.WAITING
        self.pass_gate()
        self.zone = before

    def _note(self, optimizer: Any) -> None:
        known = self._seen.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._seen[id(optimizer)] = weakref.ref(optimizer)
            if self._on_optimizer is not None:
                self._on_optimizer(optimizer)
            return
        if self.explicit:
            return
        if self.pass_gate is not None and not self._told_of_shards:
            self._told_of_shards = True
            self._say(
                "this job has several shards, and a fault may leave them at different steps, of which none "
                "can be resumed from, unless the script calls jit.boundary() at the end of each step."
            )
        if not self._told_of_several and self._several():
            self._told_of_several = True
            self._say(
                "several optimizers step in turn, so nothing can be saved until the script calls "
                "jit.boundary() at the end of each step."
            )

    def _several(self) -> bool:
        return sum(one() is not None for one in self._seen.values()) > 1

    def _await_forward(self) -> None:
        if self._forward is None:
            self._forward = register_module_forward_pre_hook(self._first_forward)

    def _first_forward(self, module: nn.Module, _: object) -> None:
        if self._forward is None:
            return
        self._forward.remove()
        self._forward = None
        if self.step - self._begun_at < 2:
            self._buffers.look()
        if self._outermost is None or self._outermost() is not module:
            self._watch(module)
        if not self.explicit and self.zone is Zone.UNSETTLED:
            self.zone = Zone.SETTLED
            self._on_arrival()

    def _watch(self, module: nn.Module) -> None:
        if self._on_module is not None:
            self._on_module.remove()
        self._outermost = weakref.ref(module)
        _watching[module] = self
        self._on_module = module.register_forward_hook(_behind_forward)

    def _behind_outermost(self, output: object) -> None:
        for tensor in _tensors(output, depth=3):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)
                return

    def _backward_begins(self, _: torch.Tensor) -> None:
        if self.zone is Zone.SETTLED:
            self._on_generators(self.step + 1, Generators.now())


_watching: weakref.WeakKeyDictionary[nn.Module, Boundary] = weakref.WeakKeyDictionary()


def _behind_forward(module: nn.Module, _: object, output: object) -> None:
    """A function of this module, so that a model with it can be copied and pickled as before."""
    if (boundary := _watching.get(module)) is not None:
        boundary._behind_outermost(output)


def _steps_that_run() -> Iterator[int]:
    """Ids of the optimizers whose hooked `step` this thread is in, once for each call: PyTorch's wrapper."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _OPTIMIZER_FILE:
            yield id(frame.f_locals.get("self"))
        frame = frame.f_back  # type: ignore[assignment]


def _calls_closure_first(optimizer: Any) -> bool:
    """PyTorch's optimizers do; one of somebody else may change parameters in front of it."""
    return str(getattr(type(optimizer).step, "__module__", "")).startswith("torch.optim.")


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, depth - 1)
