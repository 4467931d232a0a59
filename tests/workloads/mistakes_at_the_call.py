"""Calls that can never succeed, made when their results need no waiting; prints what each raised."""

import json
from collections.abc import Callable

import torch


def outcome(mistake: Callable[[], object]) -> list[str]:
    try:
        mistake()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
        return [type(error).__name__, str(error)]
    return ["", "nothing was raised"]


def mistakes(device: str) -> dict[str, Callable[[], object]]:
    x = torch.ones(3, device=device)
    for size in range(1, 40):  # copies of ever new shapes, so that no call waits any more
        torch.empty(size, device=device).copy_(torch.ones(size, device=device))
        torch.ones(size, device=device).lerp_(torch.ones(size, device=device), 0.5)
        torch.ones(size, device=device).lerp(torch.ones(size, device=device), 0.5)
    for draw in (x.cauchy_, x.exponential_, x.log_normal_, x.normal_, x.uniform_):
        draw()
    x.geometric_(0.5)
    whole = torch.ones(3, device=device, dtype=torch.int64)
    return {
        "lerp_ of integers": lambda: whole.lerp_(whole, 0.5),
        "lerp of integers": lambda: whole.lerp(whole, 0.5),
        "cauchy_": lambda: x.cauchy_(0.0, -1.0),
        "exponential_": lambda: x.exponential_(-0.5),
        "geometric_": lambda: x.geometric_(1.5),
        "log_normal_": lambda: x.log_normal_(0.0, -1.0),
        "normal_": lambda: x.normal_(0.0, -1.0),
        "uniform_": lambda: x.uniform_(2.0, 1.0),
        "uniform_ of a narrow type": lambda: x.half().uniform_(0.0, 1e6),
        "a copy that does not fit": lambda: x.copy_(torch.ones(5, device=device)),
        "a copy that is larger": lambda: x.copy_(torch.ones(2, 3, device=device)),
    }


def transforms() -> dict[str, Callable[[], object]]:
    """Of half precision, which the CPU has not at all, and CUDA of powers of two."""
    x = torch.ones(4, 7, device="cuda", dtype=torch.float16)
    torch.fft.rfft(x[:, :4])
    return {
        "fft": lambda: torch.fft.fft(x),
        "fft once more": lambda: torch.fft.fft(x),
        "rfft of two dimensions": lambda: torch.fft.rfft2(x),
        "irfft": lambda: torch.fft.irfft(torch.fft.rfft(x[:, :4]), n=6),
        "what CUDA has, too": lambda: torch.fft.irfft(torch.fft.rfft(x[:, :4]), n=4),
    }


result = {
    device: {name: outcome(mistake) for name, mistake in mistakes(device).items()}
    for device in ("cpu", "cuda")
}
result["transforms"] = {name: outcome(mistake) for name, mistake in transforms().items()}
result["afterwards"] = {"sum": [str(torch.ones(3, device="cuda").sum().item())]}
print("RESULT " + json.dumps(result))
