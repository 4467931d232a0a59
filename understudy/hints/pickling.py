"""One pickle of all that is live: two names of one object stay names of one object (paper 000 §4.2.1).

It holds what pickle alone refuses or gets wrong: functions without a name of their own and their cells, views
of dictionaries, open files, gradients, tensors that share memory, the chain of an exception.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

import torch

from . import open_files

Reduced = Any
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CHANGEABLE = ("Tensor", "Parameter", "bytearray", "mmap", "memoryview", "array")
"""Kinds whose memory an array may share, so that a copy would be torn from it."""
_MARSHAL = 2
"""The last version whose bytes depend on the code alone, and not on who else refers to its constants."""
_MOST_NODES = 100_000
_DEEP_STACK, _FRAME = 1 << 28, 1 << 10
"""Bytes of a thread's stack for deep structures, and of it for each level."""
T = TypeVar("T")


class Memory:
    """Storages that a pickle refers to by number."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[Any, int] = {}

    def number(self, storage: torch.UntypedStorage) -> int:
        key = storage_key(storage)
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            self.storages.append(storage)
        return self._numbers[key]


def deeply(work: Callable[[], T]) -> T:
    """Do it once more, on a deep stack, where chains of objects are longer than Python's recursion may be."""
    try:
        return work()
    except RecursionError:
        pass
    results: list[T] = []
    errors: list[BaseException] = []

    def again() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the caller is
            errors.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(_DEEP_STACK)
    try:
        thread = threading.Thread(target=again)
        sys.setrecursionlimit(_DEEP_STACK // _FRAME)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    if errors:
        raise errors[0]
    return results[0]


def storage_key(storage: torch.UntypedStorage) -> tuple[str, int]:
    """Two storage objects are one storage where they have the same memory."""
    return (str(storage.device), storage.data_ptr() or -id(storage))


class StatePickler(pickle.Pickler):
    """`known`: what to say instead of an object, by its id, or of a storage, by its key."""

    def __init__(self, file: IO[bytes], known: Mapping[Any, Any], memory: Memory) -> None:
        super().__init__(file, protocol=5)
        self.known, self.memory = known, memory
        self.arrays: list[Any] = []
        self.disordered = False
        """Whether a set was met whose elements come in another order once it is made anew."""

    def persistent_id(self, value: Any) -> Any:
        found = self.known.get(id(value))
        if type(value) in (set, frozenset) and list(type(value)(list(value))) != list(value):
            self.disordered = True
        if found is None and isinstance(value, torch.UntypedStorage):
            found = self.known.get(storage_key(value))
            if found is None:
                found = ("storage", self.memory.number(value), value.nbytes(), str(value.device))
        return found

    def reducer_override(self, value: Any) -> Reduced:
        kind = type(value)
        if (reduce := _REDUCERS.get(kind)) is not None:
            return reduce(value)
        if isinstance(value, BaseException):
            return _reduce_exception(value)
        if isinstance(value, weakref.ReferenceType):
            return (weakref.ref, (value(),)) if value() is not None else (_dead_reference, ())
        if kind in open_files.KINDS:
            return (open_files.reopened, (open_files.of(value),))
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind is numpy.ndarray:
            if not has_own_memory(value):
                return _reduce_array_view(numpy, value)
            self.arrays.append(value)
            return value.__reduce__()  # protocol 5 would make an array that is a view of a bytearray
        return NotImplemented

    def check_sharing(self) -> None:
        """Raises PicklingError where an array and a tensor share memory, which would be torn apart."""
        spans = [(each.__array_interface__["data"][0], each.nbytes) for each in self.arrays]
        for storage in self.memory.storages:
            if storage.device.type != "cpu":
                continue
            begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if any(address < end and begin < address + size for address, size in spans if size):
                raise pickle.PicklingError("a tensor and a NumPy array share memory; copy one of them")


class StateUnpickler(pickle.Unpickler):
    """`find`: the object that a persistent identity stands for. `pretend`: leave files as they are."""

    def __init__(self, file: IO[bytes], find: Callable[[Any], Any], pretend: bool = False) -> None:
        super().__init__(file)
        self.find, self.pretend = find, pretend

    def persistent_load(self, identity: Any) -> Any:
        return self.find(identity)

    def find_class(self, module: str, name: str) -> Any:
        if self.pretend and (module, name) == (open_files.__name__, open_files.reopened.__name__):
            return _no_file
        return super().find_class(module, name)


def _no_file(_: Any) -> Any:
    return io.StringIO()


def has_name(function: types.FunctionType) -> bool:
    """Whether another process finds it by its module and its name."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _reduce_function(function: types.FunctionType) -> Reduced:
    """By name where it has one, else by its code and its cells."""
    if has_name(function):
        return NotImplemented
    home = function.__globals__.get("__name__")
    if home not in sys.modules:
        raise pickle.PicklingError(f"the function {function.__qualname__} belongs to no module")
    made = (marshal.dumps(function.__code__, _MARSHAL), home, function.__name__, function.__closure__)
    state = {
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
    }
    return (_make_function, made, (state, vars(function)), None, None, _fill_function)


def _make_function(code: bytes, home: str, name: str, cells: Any) -> types.FunctionType:
    return types.FunctionType(marshal.loads(code), vars(importlib.import_module(home)), name, None, cells)


def _fill_function(function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name, value in state[0].items():
        setattr(function, name, value)
    vars(function).update(state[1])


def content_of(cell: types.CellType) -> tuple[Any] | None:
    """None for a cell that is empty."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return None


def _reduce_cell(cell: types.CellType) -> Reduced:
    content = content_of(cell)
    if content is None:
        return (_make_cell, ())
    return (_make_cell, (), content, None, None, _fill_cell)


def _make_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, content: tuple[Any]) -> None:
    cell.cell_contents = content[0]


def _reduce_view(view: Any) -> Reduced:
    import gc

    (owner,) = gc.get_referents(view)  # the mapping attribute only has a proxy
    return (_view, (owner, _VIEWS[type(view)]))


def _view(owner: dict[Any, Any], kind: str) -> Any:
    return getattr(owner, kind)()


def _reduce_module(module: types.ModuleType) -> Reduced:
    return (importlib.import_module, (module.__name__,))


def _reduce_exception(error: BaseException) -> Reduced:
    """With cause and context, which pickle leaves out; without its traceback."""
    reduced = error.__reduce_ex__(4)
    if isinstance(reduced, str) or (len(reduced) > 2 and not isinstance(reduced[2], dict | None)):
        return NotImplemented
    attributes = dict(vars(error))
    chain = (error.__cause__, error.__context__, error.__suppress_context__)
    return (reduced[0], reduced[1], (attributes, chain), None, None, _fill_exception)


def _fill_exception(error: BaseException, state: Any) -> None:
    vars(error).update(state[0])
    error.__cause__, error.__context__, error.__suppress_context__ = state[1]


def _dead_reference() -> Any:
    return weakref.ref(type("Dead", (), {})())


def _reduce_generator(generator: torch.Generator) -> Reduced:
    return (_generator, (str(generator.device), generator.get_state()))


def _generator(device: str, state: torch.Tensor) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(state)
    return made


def _reduce_inference_mode(mode: Any) -> Reduced:
    return (torch.inference_mode, (mode.mode,))


def _reduce_tensor(tensor: torch.Tensor) -> Reduced:
    """Its memory by number, whoever shares it; its gradient, which PyTorch's own pickles leave out."""
    plain = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return NotImplemented
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise pickle.PicklingError("a tensor has hooks; remove them before the hint")
    graph = tensor.grad_fn is not None
    if graph and not _is_spent(tensor.grad_fn):
        raise pickle.PicklingError(
            "a tensor is part of a graph that backward() has not been through; use .detach() or .item()"
        )
    made = (
        isinstance(tensor, torch.nn.Parameter),
        graph,
        tensor.dtype,
        tensor.untyped_storage(),
        (tensor.storage_offset(), tuple(tensor.size()), tensor.stride()),
        tensor.requires_grad,
    )
    grad = None if graph else tensor.grad
    if grad is None and not vars(tensor):
        return (make_tensor, made)
    return (make_tensor, made, (grad, vars(tensor)), None, None, _fill_tensor)


def make_tensor(
    parameter: bool,
    graph: bool,
    dtype: torch.dtype,
    storage: torch.UntypedStorage,
    place: tuple[int, tuple[int, ...], tuple[int, ...]],
    requires_grad: bool,
) -> torch.Tensor:
    with torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    tensor.requires_grad_(requires_grad)
    with torch.enable_grad():
        return _SpentGraph.apply(tensor) if graph else tensor


def _fill_tensor(tensor: torch.Tensor, state: tuple[torch.Tensor | None, dict[str, Any]]) -> None:
    tensor.grad = state[0]
    vars(tensor).update(state[1])


class _SpentGraph(torch.autograd.Function):  # type: ignore[misc]
    """In the place of a graph that was gone through before the checkpoint was taken."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("Trying to backward through a graph a second time, behind a resumed checkpoint.")


def _is_spent(node: Any) -> bool:
    """Whether backward() has freed what a graph had saved, so that nobody can go through it once more."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node.name() == f"{_SpentGraph.__name__}Backward":
            return True
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError:
                    return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def has_own_memory(array: Any) -> bool:
    """Whether nobody else's changes show in an array, and its own nowhere else."""
    base = array.base
    return base is None or (type(base) is not type(array) and type(base).__name__ not in _CHANGEABLE)


def _reduce_array_view(numpy: Any, view: Any) -> Reduced:
    root = view
    while type(root.base) is numpy.ndarray:
        root = root.base
    if not has_own_memory(root):
        raise pickle.PicklingError("a NumPy array is a view of something that is no array; copy it")
    if root.dtype.hasobject or not (root.flags.c_contiguous or root.flags.f_contiguous):
        raise pickle.PicklingError("a NumPy array is a view of objects, or of scattered memory; copy it")
    offset = view.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return (_array_view, (root, view.dtype, view.shape, offset, view.strides, view.flags.writeable))


def _array_view(root: Any, dtype: Any, shape: Any, offset: int, strides: Any, writeable: bool) -> Any:
    import numpy

    whole = root if root.flags.c_contiguous else root.T
    made: Any = numpy.ndarray(shape, dtype, buffer=whole, offset=offset, strides=strides)
    if not writeable:
        made.flags.writeable = False
    return made


_REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    types.FunctionType: _reduce_function,
    types.CellType: _reduce_cell,
    types.ModuleType: _reduce_module,
    torch.Generator: _reduce_generator,
    torch.inference_mode: _reduce_inference_mode,
    **dict.fromkeys(_PLAIN_TENSORS, _reduce_tensor),
    **dict.fromkeys(_VIEWS, _reduce_view),
}
