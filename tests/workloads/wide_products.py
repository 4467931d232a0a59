"""Loss and gradients of linear_cross_entropy in bfloat16: `python wide_products.py cuda|cpu|branch`.

`branch`: on the CPU, but by what PyTorch's Python code does for `cuda`, with the kernels of the `cpu` driver.
"""

import inspect
import json
import sys
import textwrap

import torch
from torch.nn.functional import linear_cross_entropy
from torch.nn.modules import linear_cross_entropy as module
from torch.nn.modules import linear_cross_entropy_options as options

WHERE = sys.argv[1]


def take_the_branch_for_cuda() -> None:
    from understudy.proxy_server import _server  # registers the kernels

    assert "mm.dtype_out" in _server.EQUIVALENT_OPERATORS
    context = module._ChunkContext
    source = textwrap.dedent(inspect.getsource(context.build))
    question = 'is_cuda = device.type == "cuda"'
    assert source.count(question) == 1
    names = dict(vars(module))
    exec(source.replace(question, "is_cuda = True"), names)
    context.build = names["build"]
    defaults = options._AUTO_DEFAULTS
    defaults["cpu", torch.bfloat16] = defaults["cuda", torch.bfloat16]


def bits(tensor: torch.Tensor) -> list[str]:
    return [value.hex() for value in tensor.detach().cpu().double().flatten().tolist()]


if WHERE == "branch":
    take_the_branch_for_cuda()
device = "cuda" if WHERE == "cuda" else "cpu"
given = torch.linspace(-3, 2, 16 * 24, dtype=torch.float64).mul(7).sin().bfloat16()
rows = given[:192].view(16, 12).to(device, copy=True).requires_grad_()
weight = given[192:].view(16, 12).to(device, copy=True).requires_grad_()
target = torch.arange(16, device=device) * 5 % 16
loss = linear_cross_entropy(rows, weight, target, options=options.LinearCrossEntropyOptions())
loss.backward()
assert rows.grad is not None and weight.grad is not None
print("RESULT " + json.dumps([bits(loss), bits(rows.grad), bits(weight.grad)]))
