"""Typed kernels: which rows are in use; whether calls in steady state find their templates again."""

import json

import torch

from understudy.proxy_client import _client

a = torch.arange(6.0, device="cuda").reshape(2, 3)
b = torch.ones(2, 3, device="cuda")
image = torch.ones(1, 2, 5, 5, device="cuda", requires_grad=True)
weight = torch.ones(2, 2, 3, 3, device="cuda", requires_grad=True)
lists = [torch.ones(3, device="cuda") for _ in range(3)]
CALLS = [
    lambda: a + b,
    lambda: a.add_(b, alpha=2),
    lambda: torch.add(a, torch.tensor(2.5)),  # a CPU scalar travels by value
    lambda: torch.clamp(a, min=1),
    lambda: torch.sum(a, dim=(0, 1), keepdim=True, dtype=torch.float64),
    lambda: torch.argmax(a),
    lambda: torch.cat([a, b], 1),
    lambda: torch.native_dropout(a, 0.0, True),
    lambda: torch.nn.functional.conv2d(image, weight).sum().backward(),
    lambda: torch.nn.functional.layer_norm(a, (3,)),
    lambda: torch.nn.functional.gelu(a, approximate="tanh"),
    lambda: torch._foreach_addcdiv_(lists, lists, lists, [1, 2.0, True]),
    lambda: torch._foreach_mul_(lists, torch.tensor(2.0, device="cuda")),
    lambda: torch._foreach_norm(lists),
    lambda: a.zero_(),
]
unstable: list[int] = []
for number, call in enumerate(CALLS):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    before = _client.statistics()["templates"]
    call()
    if _client.statistics()["templates"] != before:
        unstable.append(number)
print("RESULT " + json.dumps({"rows": _client.direct_operators(), "unstable": unstable}))
