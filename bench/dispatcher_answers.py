"""What PyTorch's dispatcher says of every operator it knows: in a worker, and in a device server.

    python -P bench/dispatcher_answers.py worker|server        as JSON

Either has kernels of ours that the other has not, so each is asked in a process of its own. Neither needs a
proxyd: kernels are registered as libraries are loaded, and no session begins before a device is used.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

KEYS = {
    "worker": (
        "Undefined", "BackendSelect", "CUDA", "PrivateUse1", "AutogradPrivateUse1", "SparsePrivateUse1",
        "SparseCsrPrivateUse1", "NestedTensorPrivateUse1", "AutogradNestedTensor",
    ),
    "server": (
        "CPU", "SparseCPU", "SparseCsrCPU", "NestedTensorCPU", "QuantizedCPU", "MkldnnCPU",
    ),
}  # fmt: skip
"""Whose kernels are asked for."""
_ROW = re.compile(
    r"(?P<key>\w+): (?P<through>fallthrough )?registered (?:at|by) (?P<file>.*?)(?::\d+)? \[(?P<kind>.*)\]"
)
_OURS = re.compile(r".*/(?P<path>proxy_(?:client|server)/csrc/.*)")
_WITH_SIGNATURE = re.compile(r"(?P<key>\w+): registered at .* :: \((?!none\))", re.MULTILINE)


def rows(torch_c: Any, name: str, keys: tuple[str, ...]) -> dict[str, list[str]]:
    """For each key with a kernel: the file that registered it (of ours: its path here), and as what.

    Raises ValueError where the dispatcher's text is not as it was.
    """
    found = {}
    for line in torch_c._dispatch_dump_table(name).splitlines():
        if line.partition(": ")[0] not in keys:
            continue
        if (row := _ROW.fullmatch(line)) is None:
            raise ValueError(f"of {name} the dispatcher says {line!r}")
        if not row["through"]:
            ours = _OURS.fullmatch(row["file"])
            found[row["key"]] = [ours["path"] if ours else row["file"].rpartition("/")[2], row["kind"]]
    return found


def with_signature(torch_c: Any, name: str) -> list[str]:
    """The keys at which the operator has kernels with its own C++ signature, not boxed ones."""
    return [row["key"] for row in _WITH_SIGNATURE.finditer(torch_c._dispatch_dump(name))]


def of_worker() -> dict[str, Any]:
    """The answers in a process that the virtual device has come into as into a script."""
    from understudy.proxy_client import activation

    activation.install()
    import torch

    from understudy.proxy_client import _client

    operators = answers(torch, "worker")
    torch_c: Any = torch._C
    for schema in torch_c._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if name not in operators:
            continue  # TorchScript's own
        aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
        operators[name] |= {
            "takes_tensors": any("Tensor" in str(given.type) for given in schema.arguments),
            "has_out": any(given.is_out for given in schema.arguments),
            "gives_views": any(not alias.is_write for alias in aliases),
            "on_cuda": torch_c._dispatch_has_kernel_for_dispatch_key(name, "CUDA"),
            "with_signature": with_signature(torch_c, name),
        }
    return {
        "torch": torch.__version__,
        "operators": operators,
        "direct": [name for name, in_use in _client.direct_operators() if in_use],
        "host_arguments": sorted(_client.host_arguments_used()),
    }


def of_server() -> dict[str, Any]:
    """The answers in a process with the kernels of the executor."""
    import torch

    from understudy.proxy_server import _server

    return {
        "operators": answers(torch, "server"),
        "widened": [list(row) for row in _server.WIDENED_OPERATORS],
    }


def answers(torch: Any, role: str) -> dict[str, dict[str, Any]]:
    return {
        name: {"rows": rows(torch._C, name, KEYS[role])}
        for name in sorted(torch._C._dispatch_get_all_op_names())
    }


if __name__ == "__main__":
    json.dump({"worker": of_worker, "server": of_server}[sys.argv[1]](), sys.stdout)
