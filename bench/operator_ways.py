"""Where a call of an operator on the virtual device runs: decided from what the dispatcher says.

`way_of` is for tensors of layout strided, on driver `cpu`. What is no fact of the dispatcher's is read from
the source (`own_kernels`, `refused_by_the_server`), so that a row that is added there is seen here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER, SERVER = "proxy_client/csrc", "proxy_server/csrc"
REGISTRATIONS = f"{WORKER}/operators/registrations.cpp"
CPU_BRANCHES = f"{WORKER}/operators/cpu_branches.cpp"
ATTENTION = f"{WORKER}/operators/attention.cpp"
SPARSE = f"{WORKER}/sparse/sparse_registrations.cpp"
NESTED = f"{WORKER}/nested/nested_registrations.cpp"
EQUIVALENTS = f"{SERVER}/operators/equivalents.cpp"
CALL_TEMPLATE = f"{SERVER}/calls/call_template.cpp"
COMPOSED = "math kernel"
"""Of CompositeImplicitAutograd: taken apart above autograd."""
COMPOSED_BELOW = "default backend kernel"
"""Of CompositeExplicitAutograd: taken apart below it."""
BY_DEVICE = "RegisterBackendSelect.cpp"
"""Whose kernels of factories go by the device that is named."""


@dataclass(frozen=True)
class Kernel:
    """What is registered: by which file (of ours: its path), and as what it counts."""

    file: str
    kind: str

    @property
    def ours(self) -> bool:
        return self.file.startswith((WORKER, SERVER))

    @property
    def in_python(self) -> bool:
        return self.file.endswith(".py")


@dataclass(frozen=True)
class Operator:
    """An overload, with its kernels by dispatch key in a worker and in a device server."""

    name: str
    worker: Mapping[str, Kernel]
    server: Mapping[str, Kernel]
    takes_tensors: bool
    has_out: bool
    gives_views: bool
    on_cuda: bool
    """Whether a kernel for CUDA is its own, not one of all operators."""
    with_signature: frozenset[str]
    direct: bool

    @property
    def namespace(self) -> str:
        return self.name.partition("::")[0]

    @property
    def base(self) -> str:
        """Without its overload."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class _Described:
    title: str
    where: str
    why: str
    code: tuple[str, ...]
    tests: tuple[str, ...]


class Way(Enum):
    """Each operator has one."""

    BOXED = _Described(
        "forwarded, boxed",
        "device server",
        "the device has a kernel: one record, encoded from boxed arguments, whatever the signature",
        (REGISTRATIONS, f"{WORKER}/call/operator_call.cpp"),
        (
            "tests/client/test_conformance.py",
            "tests/scripts/test_odd_programs.py",
            "tests/device_server/test_executor.py",
        ),
    )
    WHOLE = _Described(
        "forwarded whole",
        "device server",
        "PyTorch would take it apart in the worker: one record for each tensor of a list, another algorithm "
        "than the CPU's, or a kernel of the CPU's that is called directly; the device takes it apart",
        (REGISTRATIONS, f"{WORKER}/call/operator_call.cpp"),
        ("tests/client/test_conformance.py", "tests/scripts/test_odd_programs.py"),
    )
    DIRECT = _Described(
        "forwarded, by its own signature",
        "device server",
        "the same record; training calls it so often that boxing would be felt",
        (
            f"{WORKER}/call/direct_call.h",
            f"{WORKER}/call/direct_elementwise.cpp",
            f"{WORKER}/call/direct_layers.cpp",
            f"{WORKER}/call/direct_lists.cpp",
        ),
        ("tests/client/test_direct_calls.py", "tests/client/test_conformance.py"),
    )
    CHECKED = _Described(
        "forwarded, its numbers checked in the worker",
        "device server",
        "a wrong number must raise at the call, which nobody waits for",
        (f"{WORKER}/operators/random_checks.cpp",),
        ("tests/client/test_mistakes_at_the_call.py",),
    )
    EQUIVALENT = _Described(
        "forwarded, to an equivalent of ours",
        "device server",
        "only CUDA has a kernel, and scripts call it: on driver `cpu` ours stands in its place",
        (EQUIVALENTS, f"{SERVER}/operators/equivalent_attention.cpp"),
        ("tests/scripts/test_parallelism.py", "tests/client/test_named_on_cuda.py"),
    )
    CPU_BRANCH = _Described(
        "issued as the CPU's branch",
        "worker; its parts as this table says",
        "PyTorch's composite takes fused kernels for a device that says `cuda`, whose last bits are others",
        (CPU_BRANCHES, f"{WORKER}/operators/recurrent.cpp"),
        ("tests/client/test_composites.py", "tests/scripts/test_real_scripts.py"),
    )
    OTHER_NAME = _Described(
        "issued under another name",
        "worker; its parts as this table says",
        "scaled dot product attention asks for a device's own kernel by this name; on driver `cpu` it is the "
        "CPU's fused one",
        (ATTENTION,),
        ("tests/client/test_composites.py", "tests/client/test_named_on_cuda.py"),
    )
    MEMORY = _Described(
        "memory",
        "worker, with a record where memory comes or changes its size",
        "the worker gives out addresses and handles without waiting; the server allocates what the record "
        "says",
        (f"{WORKER}/operators/local_kernels.cpp", f"{WORKER}/device/virtual_memory.cpp"),
        (
            "tests/client/test_worker.py",
            "tests/device_server/test_executor_views.py",
            "tests/client/test_conformance.py",
        ),
    )
    VIEW = _Described(
        "a view, by a kernel of ours",
        "worker, without a record",
        "only sizes and strides change; those of a tensor travel with each call that reads it",
        (f"{WORKER}/operators/local_kernels.cpp", NESTED),
        ("tests/device_server/test_executor_views.py", "tests/client/test_conformance.py"),
    )
    COMPOSED_VIEW = _Described(
        "a view, by PyTorch's kernel",
        "worker, without a record of its own",
        "PyTorch makes it of `as_strided` and other views, for any device",
        (f"{WORKER}/operators/local_kernels.cpp",),
        ("tests/device_server/test_executor_views.py", "tests/client/test_conformance.py"),
    )
    TRANSFER = _Described(
        "a transfer",
        "worker and device server, by records of their own",
        "bytes of the script's go with the record, or come back with an answer",
        (f"{WORKER}/transfers.cpp",),
        ("tests/client/test_worker.py", "tests/client/test_conformance.py"),
    )
    TO_OTHER_LAYOUT = _Described(
        "forwarded whole, for a sparse or nested result",
        "device server",
        "the result consists of dense tensors whose lengths only the device knows, or an error is due at the "
        "call: the call waits",
        (SPARSE, f"{WORKER}/sparse/sparse_call.cpp"),
        ("tests/client/test_sparse.py", "tests/device_server/test_executor_sparse.py"),
    )
    OF_PIECES = _Described(
        "a sparse tensor of given pieces",
        "worker, without a record of its own",
        "its pieces are there already; PyTorch's kernel would make a tensor that is not ours",
        (SPARSE, f"{WORKER}/sparse/sparse_kernels.cpp"),
        ("tests/client/test_sparse.py",),
    )
    COMPOSED_ABOVE = _Described(
        "taken apart above autograd",
        "worker; its parts as this table says",
        "PyTorch composes it of other operators (CompositeImplicitAutograd), also their derivatives",
        (),
        ("tests/client/test_conformance.py",),
    )
    COMPOSED_BELOW = _Described(
        "taken apart below autograd",
        "worker; its parts as this table says",
        "PyTorch composes it of other operators for each device without a kernel "
        "(CompositeExplicitAutograd), and the CPU, too, has no kernel that would be another algorithm",
        (REGISTRATIONS,),
        ("tests/client/test_conformance.py",),
    )
    COMPOSED_OUT = _Described(
        "taken apart, an out= form",
        "worker; its parts as this table says",
        "as above; nearly all are made by PyTorch's generator: the operator itself, and a copy",
        (REGISTRATIONS,),
        ("tests/client/test_conformance.py",),
    )
    HOST = _Described(
        "on the host",
        "worker, without a record",
        "neither a tensor nor a device is among its arguments (a few have no kernel for that, anywhere)",
        (),
        (),
    )
    COLLECTIVE = _Described(
        "a collective",
        "worker, by the process group, as records of their own",
        "PyTorch has the kernel for CUDA's key in every build; our tensors come to another one",
        (REGISTRATIONS, f"{WORKER}/distributed/process_group.cpp"),
        ("tests/gpus/test_own_collectives.py", "tests/scripts/test_parallelism.py"),
    )
    ONLY_OTHER_LAYOUTS = _Described(
        "refused for strided tensors, by PyTorch in the device server",
        "nowhere",
        "the CPU has a kernel for sparse, nested, quantized or oneDNN tensors alone; of sparse and nested "
        "ones see [the layout](#what-else-decides)",
        (f"{WORKER}/call/operator_call.cpp", SPARSE, NESTED),
        ("tests/static/test_operators_page.py", "tests/client/test_sparse.py"),
    )
    NO_KERNEL = _Described(
        "refused, by PyTorch in the device server",
        "nowhere",
        "it has no kernel for the CPU, of PyTorch's or of ours: it belongs to cuDNN, MIOpen, Metal, or to "
        "CUDA alone. On driver `cuda` those that CUDA has run there",
        (f"{WORKER}/call/operator_call.cpp", f"{SERVER}/executor/run_operator.cpp"),
        ("tests/static/test_operators_page.py",),
    )
    NOT_FOR_THE_SERVER = _Described(
        "refused, by the device server",
        "nowhere",
        "it would reach files or pointers of the server's process, or it is an operator of PyTorch's other "
        "namespaces, for other devices or programs",
        (CALL_TEMPLATE,),
        ("tests/device_server/test_executor.py", "tests/static/test_operators_page.py"),
    )
    NOT_FOR_CUDA = _Described(
        "refused, by the worker",
        "nowhere",
        "an operator that is not ATen's and has a kernel neither for CUDA nor for the CPU",
        (f"{WORKER}/operators/custom_operators.cpp",),
        ("tests/static/test_operators_page.py",),
    )
    PYTHON = _Described(
        "by a kernel in Python", "worker; what it calls as this table says",
        "an operator that is not ATen's, of which PyTorch has such a kernel, as a script's own may have one",
        (f"{WORKER}/operators/custom_operators.cpp",),
        ("tests/scripts/test_real_scripts.py",),
    )  # fmt: skip


def way_of(operator: Operator, own: Mapping[str, Way], refused: frozenset[str]) -> Way:
    """The way of a call with strided tensors of the virtual device, or that makes one.

    `own` and `refused`: `own_kernels()`, `refused_by_the_server()`. Raises ValueError where the dispatcher
    has an answer that nobody has thought of.
    """
    kernel = reached(operator)
    if kernel is None:
        return Way.HOST
    if not kernel.ours:
        return _of_pytorch(operator, kernel)
    if operator.name in own and kernel.kind == "kernel":
        return own[operator.name]
    if kernel.file != REGISTRATIONS:
        return _of_another_file(operator, kernel)
    if operator.namespace != "aten":
        return _of_another_namespace(operator, kernel)
    if operator.base in refused:
        return Way.NOT_FOR_THE_SERVER
    return _forwarded(operator)


def reached(operator: Operator) -> Kernel | None:
    """The first kernel below the layers that each operator has (autocast, vmap, autograd's own)."""
    if operator.takes_tensors:
        above = operator.worker.get("AutogradPrivateUse1")
        if above is not None and (above.ours or above.kind == COMPOSED or above.in_python):
            return above
        return operator.worker.get("PrivateUse1")
    choice = operator.worker.get("BackendSelect")
    if choice is not None and choice.file != BY_DEVICE:
        return choice
    return operator.worker.get("Undefined" if choice is None else "CUDA")


def _of_another_file(operator: Operator, kernel: Kernel) -> Way:
    if kernel.file == SPARSE:
        above = "AutogradPrivateUse1" in operator.with_signature
        return Way.OF_PIECES if above else Way.TO_OTHER_LAYOUT
    if kernel.file == NESTED and operator.gives_views:
        return Way.VIEW
    by_file = {CPU_BRANCHES: Way.CPU_BRANCH, ATTENTION: Way.OTHER_NAME}
    if kernel.file not in by_file:
        raise ValueError(f"{operator.name}: {kernel}")
    return by_file[kernel.file]


def _of_pytorch(operator: Operator, kernel: Kernel) -> Way:
    if kernel.in_python:
        return Way.PYTHON
    if not operator.takes_tensors and "BackendSelect" not in operator.worker:
        return Way.HOST
    if kernel.kind == COMPOSED:
        return Way.COMPOSED_ABOVE
    if kernel.kind != COMPOSED_BELOW:
        raise ValueError(f"{operator.name}: {kernel}")
    if operator.gives_views:
        return Way.COMPOSED_VIEW
    return Way.COMPOSED_OUT if operator.has_out else Way.COMPOSED_BELOW


def _of_another_namespace(operator: Operator, kernel: Kernel) -> Way:
    if kernel.kind == "kernel":
        return Way.COLLECTIVE
    there = operator.server.get("CPU")
    if there is not None and not there.in_python:
        return Way.NOT_FOR_THE_SERVER
    return Way.PYTHON if operator.on_cuda else Way.NOT_FOR_CUDA


def _forwarded(operator: Operator) -> Way:
    there = operator.server.get("CPU")
    if there is None:
        return Way.ONLY_OTHER_LAYOUTS if operator.server else Way.NO_KERNEL
    if there.ours:
        return Way.EQUIVALENT
    if operator.direct:
        return Way.DIRECT
    if there.kind not in ("kernel", COMPOSED_BELOW):
        raise ValueError(f"{operator.name}: {there} in the device server")
    return Way.BOXED if there.kind == "kernel" else Way.WHOLE


class Layout(Enum):
    """Tensors that consist of dense ones: two keys in the worker, one in the server, whose kernels."""

    COO = ("sparse (COO)", "AutogradPrivateUse1", "SparsePrivateUse1", "SparseCPU", SPARSE)
    COMPRESSED = (
        "sparse (CSR, CSC, BSR, BSC)",
        "AutogradPrivateUse1",
        "SparseCsrPrivateUse1",
        "SparseCsrCPU",
        SPARSE,
    )
    NESTED = (
        "nested (strided)",
        "AutogradNestedTensor",
        "NestedTensorPrivateUse1",
        "NestedTensorCPU",
        NESTED,
    )


class LayoutWay(Enum):
    """Each operator that takes tensors has one for each layout."""

    OWN = "a kernel of ours in the worker"
    FORWARDED = "forwarded: the device has a kernel"
    COMPOSED = "taken apart by PyTorch"
    REFUSED = "refused: no such kernel"


def layout_way(operator: Operator, layout: Layout) -> LayoutWay:
    """The way of a call whose tensors have this layout."""
    _, autograd, key, there, _ = layout.value
    above, kernel = operator.worker.get(autograd), operator.worker.get(key)
    if above is not None and above.ours and above.kind == "kernel":
        return LayoutWay.OWN
    if kernel is None:
        return LayoutWay.REFUSED
    if not kernel.ours or (above is not None and above.kind == COMPOSED):
        return LayoutWay.COMPOSED
    if kernel.kind == "kernel" and key in operator.with_signature:
        return LayoutWay.OWN
    return LayoutWay.FORWARDED if there in operator.server else LayoutWay.REFUSED


_SECTIONS = {
    "memory": Way.MEMORY,
    "views": Way.VIEW,
    "transfers": Way.TRANSFER,
    "their numbers are checked here": Way.CHECKED,
}
"""How registrations.cpp groups kernels of its own."""
_OWN_TABLE = re.compile(
    r"TORCH_LIBRARY_IMPL\(aten, PrivateUse1, library\) \{\s*OwnKernel own\[\] = \{(?P<rows>.*?)\n  \};",
    re.DOTALL,
)
_OWN_ROW = re.compile(r'// (?P<section>.*)|\{"(?P<name>[^"]+)", TORCH_FN')
_REFUSED = re.compile(r"& refused\(\) \{(?P<names>.*?)\n\}", re.DOTALL)


def own_kernels() -> dict[str, Way]:
    """The rows of registrations.cpp by their groups.

    Raises ValueError where the table has a group that is not known here.
    """
    table = _OWN_TABLE.search((ROOT / REGISTRATIONS).read_text())
    if table is None:
        raise ValueError(f"{REGISTRATIONS} has no table of own kernels")
    found: dict[str, Way] = {}
    way = None
    for row in _OWN_ROW.finditer(table["rows"]):
        if row["section"]:
            way = _SECTIONS.get(row["section"])
        elif way is None:
            raise ValueError(f"{row['name']} is in a group that bench/operator_ways.py does not know")
        else:
            found[f"aten::{row['name']}"] = way
    return found


def refused_by_the_server() -> frozenset[str]:
    """The names in call_template.cpp, without overloads."""
    table = _REFUSED.search((ROOT / CALL_TEMPLATE).read_text())
    if table is None:
        raise ValueError(f"{CALL_TEMPLATE} has no table of what is refused")
    return frozenset(re.findall(r'"(aten::\w+)"', table["names"]))


def operators(worker: Mapping[str, Any], server: Mapping[str, Any]) -> list[Operator]:
    """From what dispatcher_answers.py says in either process."""

    def kernels(rows: Mapping[str, list[str]]) -> dict[str, Kernel]:
        return {key: Kernel(*row) for key, row in rows.items()}

    direct = set(worker["direct"])
    return [
        Operator(
            name,
            kernels(said["rows"]),
            kernels(server["operators"][name]["rows"]),
            said["takes_tensors"],
            said["has_out"],
            said["gives_views"],
            said["on_cuda"],
            frozenset(said["with_signature"]),
            name in direct,
        )
        for name, said in worker["operators"].items()
    ]
