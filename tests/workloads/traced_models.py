"""Models that PyTorch traces with fake tensors (compile, export, make_fx, functorch), beside eager ones."""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

warnings.filterwarnings("ignore")
found: dict[str, str] = {}


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.project(x).view(*x.shape[:-1], 2, 24).transpose(-2, -3).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def models() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    sequence = torch.randn(2, 5, 16)
    return {
        "attention": (Attention().cuda(), sequence.cuda()),
        "encoder": (torch.nn.TransformerEncoder(layer, 2).cuda(), sequence.cuda()),
        "multihead": (torch.nn.MultiheadAttention(16, 2, batch_first=True).cuda(), sequence.cuda()),
        "lstm": (torch.nn.LSTM(16, 8, batch_first=True).cuda(), sequence.cuda()),
        "lstm cell": (torch.nn.LSTMCell(16, 8).cuda(), sequence[:, 0].cuda()),
        "gru cell": (torch.nn.GRUCell(16, 8).cuda(), sequence[:, 0].cuda()),
        "dropout": (
            torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Dropout(0.5)).cuda(),
            sequence.cuda(),
        ),
    }


def call(model: Callable[..., Any], x: torch.Tensor, source: torch.nn.Module) -> Any:
    return model(x, x, x) if isinstance(source, torch.nn.MultiheadAttention) else model(x)


def first(result: Any) -> torch.Tensor:
    while isinstance(result, tuple):
        result = result[0]
    return result


def bits(model: Callable[..., Any], x: torch.Tensor, source: torch.nn.Module) -> list[list[str]]:
    """Of the result and of the gradients."""
    torch.manual_seed(7)
    out = first(call(model, x, source))
    gradients = torch.autograd.grad(out.square().sum(), list(source.parameters()), allow_unused=True)
    return [[v.hex() for v in t.flatten().tolist()] for t in (out, *gradients) if t is not None]


def check(name: str, run: Callable[[], bool]) -> None:
    try:
        found[name] = "" if run() else "other bits"
    except Exception as error:  # noqa: BLE001 - each is to be heard
        found[name] = f"{type(error).__name__}: {error}"[:400]
    torch._dynamo.reset()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


for kind, (model, x) in models().items():
    for backend in ("inductor", "eager", "aot_eager"):

        def compiled(model: torch.nn.Module = model, x: torch.Tensor = x, backend: str = backend) -> bool:
            return bits(torch.compile(model, backend=backend), x, model) == bits(model, x, model)

        check(f"{kind}, compiled by {backend}", compiled)
    arguments = (x, x, x) if kind == "multihead" else (x,)

    def exported(model: torch.nn.Module = model, arguments: Any = arguments) -> bool:
        program = torch.export.export(model.eval(), arguments).module()
        return close(first(program(*arguments)), first(model(*arguments)))

    check(f"{kind}, exported", exported)
    for mode in ("real", "fake", "symbolic"):

        def traced(model: torch.nn.Module = model, arguments: Any = arguments, mode: str = mode) -> bool:
            graph = make_fx(lambda *a: first(model(*a)), tracing_mode=mode, _allow_non_fake_inputs=True)(
                *arguments
            )
            return close(first(graph(*arguments)), first(model(*arguments)))

        check(f"{kind}, {mode} make_fx", traced)

attention, x = models()["attention"]
causal = torch.ones(5, 5, dtype=torch.bool, device="cuda").tril()
check(
    "attention under vmap",
    lambda: close(torch.vmap(attention)(x), torch.stack([attention(row) for row in x])),
)
check(
    "attention with a mask, compiled",
    lambda: close(torch.compile(attention)(x, causal), attention(x, causal)),
)
check(
    "attention's Jacobian",
    lambda: close(
        torch.func.jacrev(attention)(x[0]),
        torch.autograd.functional.jacobian(attention, x[0]),  # type: ignore[no-untyped-call]
    ),
)
lengths = torch.compile(attention, dynamic=True)
check(
    "attention of changing lengths",
    lambda: all(close(lengths(x[:, :n]), attention(x[:, :n])) for n in (3, 4, 5)),
)
sys.stdout.write("RESULT " + json.dumps(found) + "\n")
