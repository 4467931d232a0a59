"""Calls with tensors of the CPU and of the device, each twice; prints what they raised or gave, as JSON."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from understudy.proxy_client import _client

Call = Callable[[], Any]
aten = torch.ops.aten


def outcome(call: Call) -> list[str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
        return [type(error).__name__, str(error)]
    return ["", "nothing was raised"]


def bits(result: Any) -> list[str]:
    tensors = result if isinstance(result, list | tuple) else [result]
    plain = [t.to_padded_tensor(0.0) if t.is_nested else t for t in tensors]
    return [f"{t.device.type} {t.dtype} {t.cpu().tolist()}" for t in plain]


there = torch.arange(12.0, device="cuda").view(3, 4)
square = torch.ones(4, 4, device="cuda")
host = torch.ones(3, 4)
indices = torch.tensor([2, 0])
scalars = torch.tensor([0.5])
image, filters = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)

REFUSED: dict[str, Call] = {
    "add": lambda: there + host,
    "add, the other way round": lambda: host + there,
    "add_": lambda: there.add_(host),
    "add_ to the CPU's": lambda: host.add_(there),
    "add, out= on the CPU": lambda: torch.add(there, there, out=host),
    "add_ to a number": lambda: torch.tensor(1.0).add_(there[0, 0]),
    "where": lambda: torch.where(host > 0, there, there),
    "foreach": lambda: torch._foreach_add([there], [host]),
    "mm": lambda: there @ torch.ones(4, 4),
    "mm, the other way round": lambda: host @ square,
    "addmm": lambda: functional.linear(host, square, square[0]),
    "addmm, weight": lambda: functional.linear(there, torch.ones(4, 4), square[0]),
    "cat": lambda: torch.cat([there, host]),
    "index_select": lambda: functional.embedding(indices, there),
    "gather": lambda: there.gather(0, torch.zeros(1, 4, dtype=torch.int64)),
    "nll_loss": lambda: functional.cross_entropy(there, torch.tensor([0, 1, 2])),
    "layer_norm": lambda: functional.layer_norm(there, (4,), torch.ones(4), torch.ones(4)),
    "convolution": lambda: functional.conv2d(image.cuda(), filters),
    "convolution, bias": lambda: functional.conv2d(image.cuda(), filters.cuda(), torch.ones(1)),
    "convolution, input": lambda: functional.conv2d(image, filters.cuda()),
    "large": lambda: there.new_ones(1 << 20) * torch.ones(1 << 20),
    "sparse": lambda: torch.sparse.mm(square.to_sparse(), torch.ones(4, 4)),
    "large indices": lambda: there.new_ones(4)[torch.zeros(1 << 20, dtype=torch.int64)],
}

ACCEPTED: dict[str, Callable[[str], Any]] = {
    "a number": lambda device: there.to(device) * torch.tensor(0.1) + torch.tensor(2),
    "a number in a product": lambda device: torch.where(
        there.to(device) > 2, torch.tensor(1.0), there.to(device)
    ),
    "a number to fill with": lambda device: there.to(device).masked_fill(
        there.to(device) > 2, torch.tensor(-1.0)
    ),
    "indices": lambda device: there.to(device)[indices],
    "two lists of indices": lambda device: there.to(device)[indices, torch.tensor([1, 3])],
    "a mask": lambda device: there.to(device)[torch.tensor([True, False, True])],
    "writing by indices": lambda device: there.to(device).index_put(
        (indices,), torch.full((2, 4), 7.0, device=device)
    ),
    "_index_put_impl_": lambda device: aten._index_put_impl_(
        there.to(device, copy=True), [indices], torch.full((2, 4), 7.0, device=device), True
    ),
    "bernoulli_": lambda device: there.to(device, copy=True).bernoulli_(torch.tensor([0.0, 1.0, 1.0, 0.0])),
    "_nested_from_padded": lambda device: aten._nested_from_padded(
        torch.ones(2, 3, 4, device=device), torch.tensor([[2, 4], [3, 4]])
    ),
    "_foreach_addcdiv": lambda device: torch._foreach_addcdiv(*three(device), scalars),
    "_foreach_addcdiv_": lambda device: written(torch._foreach_addcdiv_, device),
    "_foreach_addcmul": lambda device: torch._foreach_addcmul(*three(device), scalars),
    "_foreach_addcmul_": lambda device: written(torch._foreach_addcmul_, device),
}


def three(device: str) -> list[list[torch.Tensor]]:
    return [[torch.full((2,), float(i), device=device)] for i in (1, 2, 3)]


def written(function: Callable[..., None], device: str) -> torch.Tensor:
    first, second, third = three(device)
    function(first, second, third, scalars)
    return first[0]


def main() -> None:
    result: dict[str, Any] = {
        "refused": {name: [outcome(call), outcome(call)] for name, call in REFUSED.items()},
        "accepted": {
            name: [bits(call("cpu")), bits(call("cuda")), bits(call("cuda"))]
            for name, call in ACCEPTED.items()
        },
        "rows": _client.host_arguments_used(),
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
