"""Buffers of modules, which a forward pass changes: copied at each boundary, and put back before a save.

Of a DTensor the part of this rank is what is copied and compared: an operation of the whole may be a
collective, which has no place in a save.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


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
        """Of each that was changed since the last call, with one call of PyTorch."""
        changed = [(one, tensor) for one in self._known.values() if (tensor := one.differing()) is not None]
        if not changed:
            return
        with torch.no_grad():
            owns = [tensor if type(tensor) is torch.Tensor else _own(tensor) for _, tensor in changed]
            copies = [one.place_for(own) for (one, _), own in zip(changed, owns, strict=True)]
            torch._foreach_copy_(copies, owns)
        for one, tensor in changed:
            one.see(tensor)

    def put_back(self) -> str | None:
        """Returns what could not be put back, as a remark, or None."""
        late = [one.name for one in self._known.values() if not one.put_back()]
        if not late:
            return None
        return f"the buffer {late[0]!r} changed for the first time in this step and is saved as it is now."

    def moved(self) -> bool:
        return any(one.changed() for one in self._known.values())

    def aside(self) -> Callable[[], None]:
        """Remembers what `put_back` would change; calling the answer makes it so again."""
        now = [(one, found) for one in self._known.values() if (found := one.changed_now()) is not None]

        def take_up() -> None:
            for one, tensor in now:
                one.take_up(tensor)

        return take_up


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
        self._copy: torch.Tensor | None = _own(tensor).clone() if self._silent else None
        self.see(tensor)

    def place_for(self, own: torch.Tensor) -> torch.Tensor:
        """The copy, which is to be written over."""
        if self._copy is None or self._copy.shape != own.shape or self._copy.dtype != own.dtype:
            self._copy = own.clone()
        return self._copy

    def put_back(self) -> bool:
        """False: it was changed, and there is no copy."""
        if (tensor := self.differing()) is None:
            return True
        if self._copy is None:
            return False
        own = _own(tensor)
        if own.shape == self._copy.shape and own.dtype == self._copy.dtype:
            own.copy_(self._copy)
        elif hasattr(tensor, "to_local"):
            return False  # a DTensor that has become another one
        elif (module := self._module()) is not None:
            module._buffers[self.name] = tensor = self._copy.clone()
        self.see(tensor)
        return True

    def changed(self) -> bool:
        """Since it was last seen, and can be put back."""
        tensor = self._now()
        if tensor is None or self._copy is None:
            return False
        return not torch.equal(_own(tensor), self._copy) if self._silent else self._differs(tensor)

    def changed_now(self) -> torch.Tensor | None:
        """A copy of what it is, if that is not what `put_back` makes it."""
        tensor = self.differing()
        return None if tensor is None or self._copy is None else _own(tensor).clone()

    def take_up(self, value: torch.Tensor) -> None:
        """What `changed_now` has answered, again."""
        if (tensor := self._now()) is not None and (own := _own(tensor)).shape == value.shape:
            own.copy_(value)

    def differing(self) -> torch.Tensor | None:
        """What the buffer is, if it may have been changed since it was last seen."""
        if (tensor := self._now()) is None:
            return None
        return tensor if self._silent or self._differs(tensor) else None

    def see(self, tensor: torch.Tensor) -> None:
        """The copy is of this one, as it is."""
        if not self._silent:
            self._version, self._tensor = tensor._version, weakref.ref(tensor)

    def _now(self) -> torch.Tensor | None:
        module = self._module()
        tensor = None if module is None else module._buffers.get(self.name)
        return None if tensor is None or tensor.is_inference() else tensor

    def _differs(self, tensor: torch.Tensor) -> bool:
        return self._silent or tensor._version != self._version or self._tensor() is not tensor


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, without a history: nothing that is done with it is a collective."""
    with torch.no_grad():
        if (to_local := getattr(tensor, "to_local", None)) is not None:
            tensor = to_local()
        return tensor.detach()
