"""Many steps of a tiny model; says at marks what the client holds (bench/leak.py)."""

import argparse
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MARKS = 5


def held() -> dict[str, Any]:
    """Tables and private memory of this process; the log's bytes."""
    facts: dict[str, Any] = {}
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                facts["private_bytes"] = int(line.split()[1]) * 1024
    if "understudy.proxy_client" in sys.modules:
        from understudy.proxy_client import _client

        statistics = _client.statistics()
        names = ("templates", "address_blocks", "dictionary_bytes", "log_bytes")
        facts |= {name: statistics[name] for name in names}
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for step in range(1, arguments.steps + 1):
        inputs = torch.randn(8, 16).to(arguments.device)
        labels = torch.randint(4, (8,)).to(arguments.device)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            loss.item()
        if step % (arguments.steps // MARKS) == 0:
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            print("MARK", json.dumps({"step": step, **held()}), flush=True)
            if not sys.stdin.readline():  # whoever looks at other processes from outside says when to go on
                break


if __name__ == "__main__":
    main()
