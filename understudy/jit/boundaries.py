"""Where a step ends, and what of its end is kept so that a save in the middle of the next one describes it.

Parameters and optimizer state change inside `optimizer.step()` alone, so from one boundary to the next they
are those of the last completed step. Generators of random numbers and statistics of normalisation move on in
the forward pass: they are copied at each boundary, and put back before a save.

    SETTLED     forward, backward: a save describes the last completed step
    UPDATING    inside `optimizer.step()`: half of the parameters are new
    UNSETTLED   behind it, where schedulers and counters step: until the first forward pass, or, in a script
                that calls `jit.boundary()`, until that call
"""

from __future__ import annotations

import enum
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .slots import Generators


class Zone(enum.Enum):
    """Where the main thread is in a step."""

    SETTLED = "in a forward or backward pass"
    UPDATING = "inside an optimizer's step"
    UNSETTLED = "between the optimizer's step and the end of the training step"


@dataclass(frozen=True)
class Obstacle:
    """Why the state of this moment is not that of a step's end."""

    sentence: str
    passes: bool
    """Whether a training that goes on comes to a place without it."""


class Boundary:
    """Counts steps and knows the zone. Its hooks are called by the thread that trains.

    `on_arrival()` is called wherever a save may have been waited for, and before parameters change.
    `on_generators(step, generators)` is called at each boundary, and when a backward pass begins: then with
    those that this rank will have at the end of `step` as far as anybody can know, because a rank may be
    killed behind its last collective and in front of its own boundary.
    """

    def __init__(
        self,
        on_arrival: Callable[[], None],
        on_generators: Callable[[int, Generators], None],
        say: Callable[[str], None],
    ) -> None:
        self.zone = Zone.UNSETTLED
        self.explicit = False
        self.step = 0
        """Steps completed since the training began, those before a restart included."""
        self.generators: Generators | None = None
        """At the last boundary; None before the first one of this process."""
        self._begun_at = 0
        self._on_arrival, self._on_generators, self._say = on_arrival, on_generators, say
        self._inside: list[int] = []
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._told_of_several = False
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

    def go_on_from(self, step: int) -> None:
        """The count goes on there: the state of that step is what the script is about to load."""
        self.step = self._begun_at = step

    def declare(self) -> None:
        """The script says: a step ends here. From the first call on, nothing else is taken for an end."""
        if not self.explicit:
            self.explicit = True
            self.step = self._begun_at  # what optimizers counted in the first step is this very step
        self._complete()
        self.zone = Zone.SETTLED
        self._on_arrival()

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

    def moved(self) -> bool:
        """Whether somebody has drawn numbers, or changed statistics, since `put_back`."""
        return Generators.now() != self.generators or self._buffers.moved()

    def _complete(self) -> None:
        self.step += 1
        self.generators = Generators.now()
        self._buffers.copy()
        self._on_generators(self.step, self.generators)
        self._await_forward()

    def _before_optimizer(self, optimizer: Any, *_: object) -> None:
        self._on_arrival()  # a thread that saves must not see parameters change
        key = id(optimizer)
        if not self._inside or key in self._inside:  # in there still: its last step raised
            self._inside = []
            self._note(optimizer)
        self._inside.append(key)
        self.zone = Zone.UPDATING

    def _behind_optimizer(self, optimizer: Any, *_: object) -> None:
        key = id(optimizer)
        if key in self._inside:
            del self._inside[self._inside.index(key) :]
        if self._inside:  # one optimizer inside another
            return
        self.zone = Zone.UNSETTLED
        if not self.explicit:
            self._complete()

    def _note(self, optimizer: Any) -> None:
        known = self._seen.get(id(optimizer))
        again = known is not None and known() is optimizer
        self._seen[id(optimizer)] = weakref.ref(optimizer)
        if again and not self.explicit and self._several() and not self._told_of_several:
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


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, depth - 1)


class Buffers:
    """Buffers of modules, those that training changes as copies. Found by passes over all objects."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Buffer] = {}

    def look(self) -> None:
        """For buffers that are not known yet."""
        for thing in gc.get_objects():
            if not issubclass(type(thing), nn.Module):
                continue
            for name, tensor in thing.__dict__.get("_buffers", {}).items():
                if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                    self._known.setdefault((id(thing), name), _Buffer(thing, name, tensor))

    def copy(self) -> None:
        """Of each that was changed since the last call."""
        for one in self._known.values():
            one.copy()

    def put_back(self) -> str | None:
        """Returns what could not be put back, as a remark, or None."""
        late = [one.name for one in self._known.values() if not one.put_back()]
        if not late:
            return None
        return f"the buffer {late[0]!r} changed for the first time in this step and is saved as it is now."

    def moved(self) -> bool:
        return any(one.changed() for one in self._known.values())


class _Buffer:
    """One buffer, by the module that has it. Cheap while nothing changes: a look-up and two comparisons.

    Normalisation writes its statistics past PyTorch's count of versions; its buffers, which are small, are
    copied every time.
    """

    __slots__ = ("_copy", "_module", "_silent", "_tensor", "_version", "name")

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self._silent = isinstance(module, _NormBase)
        self._copy: torch.Tensor | None = tensor.detach().clone() if self._silent else None
        self._see(tensor)

    def copy(self) -> None:
        if (tensor := self._now()) is None or not self._differs(tensor):
            return
        if self._copy is None or self._copy.shape != tensor.shape or self._copy.dtype != tensor.dtype:
            self._copy = tensor.detach().clone()
        else:
            self._copy.copy_(tensor.detach())
        self._see(tensor)

    def put_back(self) -> bool:
        """False: it was changed, and there is no copy."""
        if (tensor := self._now()) is None or not self._differs(tensor):
            return True
        if self._copy is None:
            return False
        if tensor.shape == self._copy.shape and tensor.dtype == self._copy.dtype:
            with torch.no_grad():
                tensor.copy_(self._copy)
        elif (module := self._module()) is not None:
            module._buffers[self.name] = tensor = self._copy.clone()
        self._see(tensor)
        return True

    def changed(self) -> bool:
        """Since it was last seen, and can be put back."""
        tensor = self._now()
        if tensor is None or self._copy is None:
            return False
        return not torch.equal(tensor, self._copy) if self._silent else self._differs(tensor)

    def _now(self) -> torch.Tensor | None:
        module = self._module()
        tensor = None if module is None else module._buffers.get(self.name)
        return None if tensor is None or tensor.is_inference() else tensor

    def _differs(self, tensor: torch.Tensor) -> bool:
        return self._silent or tensor._version != self._version or self._tensor() is not tensor

    def _see(self, tensor: torch.Tensor) -> None:
        self._version, self._tensor = tensor._version, weakref.ref(tensor)
