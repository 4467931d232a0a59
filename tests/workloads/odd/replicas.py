"""Two replicas that train for many short steps: what becomes of bits that change by themselves."""

import sys

import torch
from odd_program import begin, device, say
from torch.nn.parallel import DistributedDataParallel

begin()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).to(device)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(1, int(sys.argv[2]) + 1):
    x = torch.randn(64, 64).to(device)
    optimizer.zero_grad()
    loss = parallel(x).square().mean()
    loss.backward()
    optimizer.step()
    say(step, loss, *model.parameters())
