"""Host-to-device rate of 64 MiB payloads, from pinned and from pageable memory."""

import argparse
import json
import statistics
import time

import torch

BYTES = 64 << 20


def rate(source: torch.Tensor, target: torch.Tensor, repeats: int) -> float:
    """GB/s, median; from the call until the bytes have arrived."""
    rates = []
    for repeat in range(repeats + 2):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        if repeat >= 2:  # the first ones touch fresh pages
            rates.append(BYTES / (time.perf_counter() - begin) / 1e9)
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    source = torch.arange(BYTES // 4, dtype=torch.int32)
    target = torch.empty_like(source, device="cuda")
    result = {
        "pageable_gb_per_s": rate(source, target, arguments.repeats),
        "pinned_gb_per_s": rate(source.pin_memory(), target, arguments.repeats),
    }
    if not torch.equal(target.cpu(), source):
        raise SystemExit("the bytes that arrived are not the bytes that were sent")
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
