"""Generators drawn from, read, and set back: `python generator_states.py cpu|cuda SEED`.

The device's generators show 16 bytes, as CUDA's do; what they give afterwards is what a CPU's give.
"""

import random
import sys

import torch

device = sys.argv[1]
chance = random.Random(int(sys.argv[2]))
own = torch.Generator(device)
if device == "cuda":
    assert torch.cuda.get_rng_state().numel() == 16
    assert own.get_offset() == 0
model = torch.nn.Linear(4, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
kept = [own.get_state()]
for step in range(60):
    for _ in range(8):
        match chance.randrange(9):
            case 0:
                own.manual_seed(chance.randrange(5))
            case 1:
                drawn = torch.rand(chance.randrange(1, 2000), generator=own, device=device)
            case 2:  # pairs of normal numbers, of which one may be held back
                drawn = torch.randn(chance.randrange(1, 16), generator=own, device=device)
            case 3:
                drawn = torch.randn(chance.randrange(16, 3000), generator=own, device=device)
            case 4:
                drawn = torch.randperm(chance.randrange(1, 50), generator=own, device=device).float()
            case 5:
                kept.append(own.get_state())
                continue
            case 6:
                own.set_state(chance.choice(kept))
                continue
            case 7:
                drawn = torch.bernoulli(torch.full((50,), 0.3, device=device), generator=own)
            case 8:
                drawn = torch.randn(chance.randrange(1, 4), generator=own, device=device, dtype=torch.float64)
        value = drawn.sum().item().hex() if "drawn" in globals() else ""
        print(f"{step} {own.initial_seed()} {value}\n", end="")  # in one piece
    optimizer.zero_grad()
    model(torch.randn(2, 4, generator=own, device=device)).square().sum().backward()
    optimizer.step()
