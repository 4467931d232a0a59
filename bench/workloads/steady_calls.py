"""Each of a few calls in steady state, between two marks for callgrind (bench/instructions.py)."""

import ctypes
import mmap
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

CALLS = 100  # per mark
LIST = 20  # tensors in a foreach list

# Requests to valgrind are instructions that change nothing elsewhere (valgrind/valgrind.h, x86-64):
#   mov rax, rdi; xor edx, edx; rol rdi, 3; rol rdi, 13; rol rdi, 61; rol rdi, 51; xchg rbx, rbx; ret
REQUEST_CODE = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db c3")
CALLGRIND = ord("C") << 24 | ord("T") << 16
DUMP_AT, START, STOP = CALLGRIND + 3, CALLGRIND + 4, CALLGRIND + 5


class Valgrind:
    def __init__(self) -> None:
        self.code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.code.write(REQUEST_CODE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.code))
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def request(self, what: int, text: bytes = b"") -> None:
        holder = ctypes.create_string_buffer(text)
        arguments = (ctypes.c_uint64 * 6)(what, ctypes.addressof(holder))
        self.function(ctypes.addressof(arguments))


def calls() -> dict[str, Callable[[], object]]:
    a, b = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda")
    bias = torch.ones(16, device="cuda")
    many = [torch.ones(16, 16, device="cuda") for _ in range(LIST)]
    more = [torch.ones(16, 16, device="cuda") for _ in range(LIST)]
    return {
        "add": lambda: a + b,
        "add_": lambda: a.add_(b, alpha=0.0),
        "mul by a number": lambda: a * 2.0,
        "mm": lambda: torch.mm(a, b),
        "linear": lambda: F.linear(a, b, bias),
        "relu": lambda: torch.relu(a),
        "layer_norm": lambda: F.layer_norm(a, (16,)),
        "softmax": lambda: torch.softmax(a, dim=1),
        "sum": lambda: a.sum(dim=1),
        "cat": lambda: torch.cat([a, b]),
        "copy_": lambda: a.copy_(b),
        "a boxed operator (sinh)": lambda: torch.sinh(a),
        f"foreach_add_, {LIST} tensors": lambda: torch._foreach_add_(many, more, alpha=0.0),
    }


def training_step() -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    inputs, labels = torch.ones(8, 16, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")

    def step() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    valgrind = Valgrind()

    def measure(name: str, call: Callable[[], object]) -> None:
        for _ in range(4):
            call()
        torch.cuda.synchronize()
        valgrind.request(START)
        for _ in range(CALLS):
            call()
        valgrind.request(STOP)
        valgrind.request(DUMP_AT, name.encode())
        torch.cuda.synchronize()

    with torch.no_grad():
        for name, call in calls().items():
            measure(name, call)
    measure("a training step", training_step())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
