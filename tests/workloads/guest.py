"""A script with habits of its own: modules with our names, data loader workers, forks, settings."""

import os
import re
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import protos  # the script's own
import recovery
import replay
import understudy

for module in (protos, recovery, replay, understudy):
    assert module.OWNER == "the script", module
assert os.environ.get("GUEST_SITECUSTOMIZE") == "ran", "the user's sitecustomize was lost"

torch.manual_seed(0)
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(
    TensorDataset(torch.randn(32, 4), torch.randn(32, 2)), batch_size=8, num_workers=2, pin_memory=True
)
for inputs, targets in loader:
    loss = (model(inputs.cuda(non_blocking=True)) - targets.cuda(non_blocking=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item())

foreign = {"grpc", "google", "structlog", "typer"}
ours = {name for name in sys.modules if name.split(".")[0] in foreign}
ours |= {name for name in sys.modules if re.match(r"understudy\.(?!proxy_client\b)", name)}
assert not ours, f"loaded into the worker: {ours}"
sockets = [fd for fd in os.listdir("/proc/self/fd") if "socket" in os.path.realpath(f"/proc/self/fd/{fd}")]
assert not sockets, f"open sockets in the worker: {sockets}"

child = os.fork()
if child == 0:
    try:
        torch.ones(2, device="cuda")
    except RuntimeError as error:
        os._exit(0 if "forked subprocess" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

torch.use_deterministic_algorithms(True)  # a setting that must reach the device server
try:
    torch.zeros(4, device="cuda").put_(torch.tensor([1], device="cuda"), torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    raise SystemExit("the device server ignores use_deterministic_algorithms")
except RuntimeError as error:
    assert "deterministic" in str(error), error
print("guest done", flush=True)
os._exit(0)  # the error above was asynchronous, so an orderly end would report it
