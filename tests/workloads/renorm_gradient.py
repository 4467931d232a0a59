"""The gradient of renorm on both devices, and PyTorch's formula for it with either accumulation."""

import json

import torch


def native(kind: torch.dtype, device: str) -> list[str]:
    x = given(kind).to(device).requires_grad_()
    torch.renorm(x, 2.0, 0, 0.5).backward(direction(kind).to(device))
    assert x.grad is not None
    return bits(x.grad)


def formula(kind: torch.dtype, accumulation: torch.dtype) -> list[str]:
    x, grad = given(kind), direction(kind)
    norm = torch.linalg.vector_norm(x, 2.0, (1, 2), keepdim=True, dtype=accumulation)
    along = (x * grad).sum((1, 2), keepdim=True, dtype=accumulation)
    of_norm = along * (x / norm).masked_fill_(norm == 0, 0)
    inverse = (norm + 1e-7).reciprocal()
    scaled = 0.5 * inverse * (grad - inverse * of_norm)
    return bits(torch.where(norm > 0.5, scaled.to(grad.dtype), grad))


def given(kind: torch.dtype) -> torch.Tensor:
    return torch.linspace(-3, 2, 125, dtype=torch.float64).sin().view(5, 5, 5).to(kind)


def direction(kind: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1, 4, 125, dtype=torch.float64).cos().view(5, 5, 5).to(kind)


def bits(tensor: torch.Tensor) -> list[str]:
    return [value.hex() for value in tensor.detach().cpu().double().flatten().tolist()]


print(
    "RESULT "
    + json.dumps(
        {
            "float32 native": native(torch.float32, "cpu"),
            "float32 device": native(torch.float32, "cuda"),
            "float32 in float64": formula(torch.float32, torch.float64),
            "float32 in float32": formula(torch.float32, torch.float32),
            "float64 native": native(torch.float64, "cpu"),
            "float64 device": native(torch.float64, "cuda"),
        }
    )
)
