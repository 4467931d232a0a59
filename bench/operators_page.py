"""docs/operators.md: where each operator of PyTorch runs on the virtual device, and why.

    make operators-page

tests/static/test_operators_page.py compares the page with what the dispatcher says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from operator_ways import (
    CALL_TEMPLATE,
    REGISTRATIONS,
    ROOT,
    Layout,
    LayoutWay,
    Operator,
    Way,
    layout_way,
    operators,
    own_kernels,
    refused_by_the_server,
    way_of,
)

PAGE = ROOT / "docs" / "operators.md"
ANSWERS = Path(__file__).with_name("dispatcher_answers.py")
WIDER_TYPES = "proxy_server/csrc/operators/wider_types.cpp"
DEVICE_CHECK = "proxy_client/csrc/operators/device_check.cpp"
WIDTH = 116


@dataclass(frozen=True)
class Found:
    """All operators, and what the extensions say of themselves."""

    torch: str
    operators: Sequence[Operator]
    widened: Sequence[tuple[str, str]]
    """Operators, and element types of them that the device computes by a wider type."""
    host_arguments: Sequence[str]
    """`operator argument` of what may be on the CPU among cuda tensors."""

    @cached_property
    def by_way(self) -> Mapping[Way, list[Operator]]:
        """Raises ValueError if an operator has none."""
        own, refused = own_kernels(), refused_by_the_server()
        found = defaultdict(list)
        for operator in self.operators:
            found[way_of(operator, own, refused)].append(operator)
        return found


def look() -> Found:
    """Asks a worker's and a device server's dispatcher, each in a process of its own."""
    asked = [
        subprocess.Popen(
            [sys.executable, "-P", str(ANSWERS), role], stdout=subprocess.PIPE, cwd=ROOT / "docs"
        )
        for role in ("worker", "server")
    ]
    said = [process.communicate()[0] for process in asked]
    for process in asked:
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    worker, server = map(json.loads, said)
    return Found(
        worker["torch"],
        operators(worker, server),
        [(name, dtype) for name, dtype in server["widened"]],
        worker["host_arguments"],
    )


def page(found: Found) -> str:
    """The whole page."""
    parts = (_head(found), _ways(found), _decided_by_more(found), _unknown(), _lists(found), _sources())
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(found: Found) -> Iterator[str]:
    aten = sum(operator.namespace == "aten" for operator in found.operators)
    yield f"""# Operators

Written by `make operators-page` from PyTorch's dispatcher, as it is in a worker and in a device server: do not edit it.
PyTorch {found.torch}: {len(found.operators)} operators with their overloads, {aten} of them ATen's.

    call ─▶ autograd ─▶ taken apart by PyTorch? ─▶ its parts, each by this table
                 │
                 ├─▶ a kernel of ours in the worker: memory, views, transfers, the CPU's branch
                 └─▶ forwarded: one record ─▶ device server ─▶ PyTorch's kernel, or an equivalent of ours

This is of driver `cpu`. On driver `cuda` what is forwarded meets CUDA's kernels instead, and neither equivalents nor
wider types are used; the worker does the same, but where it asks which driver there is (`operators/cpu_branches.cpp`,
`operators/attention.cpp`, `operators/custom_operators.cpp`). A build of PyTorch for CUDA has more operators in the worker's
table; none of its own kernels is left there (`tests/gpus/test_cuda_build.py`). What stands behind a name of Python and not
behind an operator (CUDA graphs, pointers, …) is in `proxy_client/refusals.py`; operators that are not PyTorch's:
[custom-operators.md](custom-operators.md).

From the dispatcher are: which operators there are, which file registers the kernel that a call reaches (for tensors
of layout strided, `AutogradPrivateUse1` and then `PrivateUse1`; for what makes tensors, `CUDA`; in the server, `CPU`),
whether it is boxed, what a schema says of views and out=. From the extensions themselves: typed kernels
(`direct_operators`), wider types, arguments that may be on the host. From the source: which group of
`{REGISTRATIONS}` a kernel of ours belongs to, and what
`{CALL_TEMPLATE}` refuses. Written by hand: why, and by which tests.
"""


def _ways(found: Found) -> Iterator[str]:
    yield "## The ways\n"
    yield "Tensors of layout strided; counts are of ATen, and of all other namespaces. Each operator has one way.\n"
    yield from ("| way | runs in | why | code | tested by | ATen | others |", "|---|---|---|---|---|---|---|")
    for way in Way:
        there = Counter(operator.namespace == "aten" for operator in found.by_way[way])
        row = way.value
        yield (
            f"| {row.title} | {row.where} | {row.why} | {_files(row.code)} | {_files(row.tests)} "
            f"| {there[True]} | {there[False]} |"
        )
    yield ""


def _files(paths: Iterable[str]) -> str:
    return ", ".join(f"[{Path(path).name}](../{path})" for path in paths) or "–"


def _decided_by_more(found: Found) -> Iterator[str]:
    yield "## What else decides\n"
    yield """**The layout.** A sparse or nested tensor consists of dense ones, and calls with it take these ways (ATen's
operators that take tensors):
"""
    yield from ("| tensors | " + " | ".join(way.value for way in LayoutWay) + " | code |", "|---" * 6 + "|")
    taking = [one for one in found.operators if one.takes_tensors and one.namespace == "aten"]
    for layout in Layout:
        title, *_, code = layout.value
        counts = Counter(layout_way(operator, layout) for operator in taking)
        yield f"| {title} | " + " | ".join(str(counts[way]) for way in LayoutWay) + f" | {_files([code])} |"
    yield ""
    for layout in Layout:
        own = [one.name for one in taking if layout_way(one, layout) is LayoutWay.OWN]
        yield from _wrapped(f"Kernels of ours for {layout.value[0]}:", _grouped(own))
    yield "Tested by `tests/client/test_sparse.py`, `tests/device_server/test_executor_sparse.py`.\n"
    yield f"""**The element type.** For these types CUDA has a kernel and the CPU none: the device server computes in a wider type
(`{WIDER_TYPES}`; `tests/client/test_wider_types.py`).
"""
    types = defaultdict(list)
    for name, dtype in found.widened:
        types[name].append(dtype)
    alike = defaultdict(list)
    for name, dtypes in types.items():
        alike[tuple(dtypes)].append(name)
    yield from ("| element types | operators |", "|---|---|")
    for group, names in alike.items():
        yield f"| {', '.join(group)} | {', '.join(_grouped(names))} |"
    yield ""
    yield f"""**The devices of its arguments.** A CPU tensor that is no single number may not meet a cuda tensor, but for these
arguments (`{DEVICE_CHECK}`; `tests/client/test_mixed_devices.py`):
"""
    yield from _wrapped("", [f"`{one.removeprefix('aten::')}`" for one in found.host_arguments])


def _unknown() -> Iterator[str]:
    yield """## What cannot be read from the dispatcher

- **Whether the parts of a composite all have a way.** A composite whose part is refused is refused by that part, with
  its name. Which operators a composite calls shows only when it is called.
- **Whether a composite follows a pointer.** Some of PyTorch's composites read memory themselves
  (`choose_qparams_optimized`, `_grid_sampler_2d_cpu_fallback`), as they would with a GPU's pointer: the worker dies, and
  says why (`tests/client/test_refusals.py`). Others call a kernel of the CPU directly: those that the conformance runs met are
  named in `forwarded_operators()` in `operators/registrations.cpp`, and forwarded whole. No table of PyTorch's says so.
- **What a kernel gives.** A quantized or oneDNN tensor cannot be held: the call that would make one raises
  `NotImplementedError`, although the device has its kernel.
- **Which overload which test calls.** Tests are given by way. `docs/conformance.md` has the entries of PyTorch's
  databases that run, which go by the names of Python functions.
"""


def _lists(found: Found) -> Iterator[str]:
    yield "## Operators by way\n"
    yield "Without `aten::`; in brackets the overloads, `-` for the one without a name.\n"
    for way in Way:
        names = [one.name for one in found.by_way[way]]
        yield f"### {way.value.title[0].upper()}{way.value.title[1:]}\n"
        if not names:
            yield "None.\n"
        aten = [name for name in names if name.startswith("aten::")]
        yield from _wrapped("", _grouped(aten))
        spaces = sorted({name.partition("::")[0] for name in names} - {"aten"})
        for space in spaces:
            of_space = [name for name in names if name.startswith(f"{space}::")]
            yield from _wrapped(f"`{space}::` ", _grouped(of_space))


def _grouped(names: Iterable[str]) -> list[str]:
    """By name, each with its overloads, if it has any but the one without a name."""
    overloads = defaultdict(list)
    for name in sorted(names):
        base, _, overload = name.partition("::")[2].partition(".")
        overloads[base].append(overload or "-")
    return [
        f"`{base}`" if those == ["-"] else f"`{base}` ({', '.join(those)})"
        for base, those in overloads.items()
    ]


def _wrapped(lead: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield textwrap.fill(
            f"{lead} {', '.join(names)}".strip(), WIDTH, break_long_words=False, break_on_hyphens=False
        )
        yield ""


def _sources() -> Iterator[str]:
    yield """## Source files

- The page: `bench/operators_page.py`, `bench/operator_ways.py`, `bench/dispatcher_answers.py`.
- Worker: `proxy_client/csrc/operators/`, `proxy_client/csrc/sparse/`, `proxy_client/csrc/nested/`.
- Device server: `proxy_server/csrc/operators/`."""


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page(look()))
