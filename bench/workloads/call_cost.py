"""What an addition costs its caller, in bursts that nothing waits for; how many a second are executed."""

import argparse
import json
import statistics
import time

import torch

BURST = 200  # calls between two looks at the clock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bursts", type=int, default=500)
    arguments = parser.parse_args()
    a = torch.ones(16, 16, device=arguments.device)
    b = torch.ones(16, 16, device=arguments.device)
    for _ in range(1000):
        c = a + b
    c.sum().item()

    bursts = []
    for _ in range(arguments.bursts):
        begin = time.perf_counter_ns()
        for _ in range(BURST):
            c = a + b
        bursts.append((time.perf_counter_ns() - begin) / BURST)
        c[0, 0].item()  # let the device catch up, outside the measured time

    a, b = torch.ones(4, device=arguments.device), torch.ones(4, device=arguments.device)
    begin = time.perf_counter_ns()
    for _ in range(arguments.bursts * BURST):
        c = a + b
    c[0].item()
    whole = (time.perf_counter_ns() - begin) / 1e9
    result = {"call_ns": statistics.median(bursts), "calls_per_s": arguments.bursts * BURST / whole}
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
