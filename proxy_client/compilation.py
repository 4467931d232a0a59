"""torch.compile: inductor writes Triton kernels for "cuda", and the worker has neither a GPU nor Triton.

Graphs that touch the device run as PyTorch captured them, operator by operator, which changes no result; the
first one says so. Graphs of the host's alone go to inductor as ever.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

_warned = False


def install(torch: ModuleType) -> None:
    """Puts the decision in front of the backend "inductor"."""
    wrapper = torch._TorchCompileInductorWrapper
    compile_graph = wrapper.__call__

    def call(self: Any, model_: Any, inputs_: Any, **options: Any) -> Any:
        if not _touches_device(model_, inputs_):
            return compile_graph(self, model_, inputs_, **options)
        _warn_once()
        return model_.forward

    wrapper.__call__ = call


def _warn_once() -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        "torch.compile: a graph on the virtual cuda device runs in eager mode, because inductor would need "
        "Triton and a GPU in the worker; results are the same. "
        '(backend="eager" or "aot_eager" avoids this warning.)',
        stacklevel=2,
    )


def _touches_device(graph_module: Any, inputs: Any) -> bool:
    import torch
    from torch.utils._pytree import tree_leaves

    graph = getattr(graph_module, "graph", None)
    nodes = list(graph.nodes) if graph is not None else []
    values = [node.meta.get("example_value", node.meta.get("val")) for node in nodes]
    tensors = [*inputs, *graph_module.parameters(), *graph_module.buffers(), *tree_leaves(values)]
    devices = {value.device.type for value in tensors if isinstance(value, torch.Tensor)}
    return "cuda" in devices
