"""How long `.item()` takes: with a device that is at work, and with one that has been idle for a while."""

import argparse
import json
import statistics
import time

import torch

BURST = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bursts", type=int, default=50)
    parser.add_argument("--idle-ms", type=float, default=2)
    arguments = parser.parse_args()
    value = torch.ones((), device=arguments.device)
    for _ in range(500):
        value.item()

    busy = []
    for _ in range(arguments.bursts):
        begin = time.perf_counter_ns()
        for _ in range(BURST):
            value.item()
        busy.append((time.perf_counter_ns() - begin) / BURST)

    after_idling = []
    for _ in range(2 * arguments.bursts):
        time.sleep(arguments.idle_ms / 1000)
        begin = time.perf_counter_ns()
        value.item()
        after_idling.append(time.perf_counter_ns() - begin)

    result = {
        "busy_us": statistics.median(busy) / 1e3,
        "after_idling_us": statistics.median(after_idling) / 1e3,
        "idle_ms": arguments.idle_ms,
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
