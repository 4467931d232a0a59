"""What a call has in common with its caller: arguments, globals, variables around it, attributes of classes.

Python says nowhere which of them a function changes. So everything that it reads by name is looked at, also
by the functions and classes of its module that it uses by name, and by functions that it has from around it.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import inspect
import logging
import types
from collections.abc import Iterator
from typing import Any

from .externals import Externals
from .pickling import content_of
from .source import HintError, where

_log = logging.getLogger("understudy.hints")
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger)
_said: set[str] = set()


class Reached:
    """The names and cells that a function can read and write without having them as arguments."""

    def __init__(self, function: types.FunctionType) -> None:
        self.home = function.__globals__
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.cells: dict[str, types.CellType] = {}
        self.written_cells: set[str] = set()
        self.classes: dict[str, type] = {}
        self._seen: set[int] = set()
        self._waiting: list[types.FunctionType] = [function]
        while self._waiting:
            self._visit(self._waiting.pop())

    def _visit(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        names = {name: self._cell(function, name, cell) for name, cell in free.items() if name != "__class__"}
        for step in _instructions(function.__code__):
            if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in names:
                self.written_cells.add(names[step.argval])
            elif function.__globals__ is self.home:
                self._global(step)

    def _cell(self, function: types.FunctionType, name: str, cell: types.CellType) -> str:
        for known, other in self.cells.items():
            if other is cell:
                return known
        key = name if name not in self.cells else f"{function.__qualname__}.{name}"
        while key in self.cells:
            key += "'"
        self.cells[key] = cell
        (value,) = content_of(cell) or (None,)
        if isinstance(value, types.FunctionType):
            self._waiting.append(value)
        return key

    def _global(self, step: dis.Instruction) -> None:
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self.written.add(step.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not hasattr(builtins, step.argval):
            self.read.add(step.argval)
            value = self.home.get(step.argval)
            if isinstance(value, types.FunctionType) and value.__globals__ is self.home:
                self._waiting.append(value)
            elif isinstance(value, type) and value.__module__ == self.home.get("__name__"):
                self.classes[step.argval] = value
                self._waiting += [
                    each for each in vars(value).values() if isinstance(each, types.FunctionType)
                ]


class Shared:
    """The objects of one call, and what a checkpoint keeps of the names that they have."""

    def __init__(
        self, function: types.FunctionType, signature: inspect.Signature, args: Any, kwargs: Any
    ) -> None:
        """Raises HintError for arguments that cannot be saved, TypeError for ones that it does not take."""
        self.function = function
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.externals = Externals()
        digests = [self._argument(name, value) for name, value in bound.arguments.items()]
        self.digest = hashlib.blake2b(repr(digests).encode(), digest_size=16).hexdigest()
        self.reached = Reached(function)
        for name in sorted(self.reached.read | self.reached.written):
            self._outer("global", name, function.__globals__.get(name))
        for name, cell in self.reached.cells.items():
            self._outer("variable", name, (content_of(cell) or (None,))[0])
        self._attributes = {name: _data_of(each) for name, each in sorted(self.reached.classes.items())}
        for name, attributes in self._attributes.items():
            for attribute, value in attributes.items():
                self._outer("class attribute", f"{name}.{attribute}", value)

    def key(self, count: int) -> str:
        """The same in each process for the same call, and for no other."""
        whole = f"{self.function.__module__} {self.function.__qualname__} {self.digest} {count}"
        return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()

    def bindings(self) -> dict[str, Any]:
        """What the names stand for that the function may bind anew."""
        home, cells = self.function.__globals__, self.reached.cells
        classes = {}
        for name, before in self._attributes.items():
            now = _data_of(self.reached.classes[name])
            classes[name] = {key: value for key, value in now.items() if before.get(key, self) is not value}
        return {
            "globals": {name: home[name] for name in sorted(self.reached.written) if name in home},
            "cells": {name: content_of(cells[name]) for name in sorted(self.reached.written_cells)},
            "classes": classes,
        }

    def bind(self, saved: dict[str, Any]) -> None:
        """Let the names stand for what they stood for when a checkpoint was taken."""
        for name in self.reached.written - saved["globals"].keys():
            self.function.__globals__.pop(name, None)
        self.function.__globals__.update(saved["globals"])
        for name, value in saved["cells"].items():
            if value is not None:
                self.reached.cells[name].cell_contents = value[0]
        for name, attributes in saved["classes"].items():
            for attribute, value in attributes.items():
                setattr(self.reached.classes[name], attribute, value)

    def _argument(self, name: str, value: Any) -> str:
        try:
            return f"{name} {self.externals.add(f'argument {name!r}', value)}"
        except Exception as error:
            raise HintError(
                f"{where(self.function)} is called with an argument {name!r} that cannot be saved "
                f"({str(error).rstrip('.')}); make it inside the function."
            ) from error

    def _outer(self, kind: str, name: str, value: Any) -> None:
        if isinstance(value, _CODE):
            return
        try:
            self.externals.add(f"{kind} {name!r}", value)
        except Exception as error:  # noqa: BLE001 - whatever its class raises
            say_once(
                f"The {kind} {name!r} of {where(self.function)} cannot be saved ({str(error).rstrip('.')}): "
                "a resumed run takes it as the new process has it."
            )


def say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        _log.warning("%s", sentence)


def _data_of(cls: type) -> dict[str, Any]:
    """A class's attributes that are neither methods nor other descriptors."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__") and not isinstance(value, _CODE) and not hasattr(type(value), "__get__")
    }


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _instructions(inner)
