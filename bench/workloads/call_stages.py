"""Where the client's time of a call goes: bursts of calls that nothing waits for, split by stage."""

import argparse
import json
import os
import statistics
from collections.abc import Callable

STAGES = ("client", "encode", "lookup", "output", "append")  # the first is the whole call
BURST = 100
LIST = 20


def main() -> None:
    os.environ["UNDERSTUDY_STATISTICS"] = "1"  # read when torch brings the client in
    import torch

    from understudy.proxy_client import _client

    parser = argparse.ArgumentParser()
    parser.add_argument("--bursts", type=int, default=500)
    arguments = parser.parse_args()
    a, b = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda")
    many = [torch.ones(16, 16, device="cuda") for _ in range(LIST)]
    more = [torch.ones(16, 16, device="cuda") for _ in range(LIST)]
    calls: dict[str, Callable[[], object]] = {
        "a + b": lambda: a + b,
        "a.add_(b)": lambda: a.add_(b, alpha=0.0),
        "a @ b": lambda: a @ b,
        "relu": lambda: torch.relu(a),
        "boxed (sinh)": lambda: torch.sinh(a),
        f"foreach_add_, {LIST} tensors": lambda: torch._foreach_add_(many, more, alpha=0.0),
    }
    result: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        bursts: list[list[float]] = []
        for _ in range(arguments.bursts + 5):
            torch.cuda.synchronize()
            before = _client.statistics()
            for _ in range(BURST):
                call()
            after = _client.statistics()
            bursts.append([(after[f"{stage}_ns"] - before[f"{stage}_ns"]) / BURST for stage in STAGES])
        medians = [statistics.median(column) for column in zip(*bursts[5:], strict=True)]
        result[name] = dict(zip(STAGES, medians, strict=True))
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
