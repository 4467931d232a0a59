"""`make bench-gpu`: step times under the proxy against native CUDA, and recovery on real GPUs."""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, describe_machine
from training_run import RunFailed, Training, gpus

MODELS = {"gpt2": "8", "resnet50": "64"}
STEPS, ROUNDS = 60, 5
KILLS = ("step=20 call=5", "step=25 call=200", "step=30 call=400")
RESULTS = ROOT / "bench" / "results" / "gpu.json"


def step_times(folder: Path) -> list[dict[str, Any]]:
    """Native and proxied runs in turns: the ratio of each pair, and whether their losses were the same."""
    results = []
    for model, batch in MODELS.items():
        # Deterministic natively, too: else no two runs have the same losses, and ours do more than they.
        arguments = [model, "--batch", batch, "--deterministic"]
        training = Training("bench/workloads/large_models.py", 1, STEPS, arguments)
        native, proxied, same = [], [], []
        for turn in range(ROUNDS):
            one = training.run(folder / f"{model}-{turn}-native", proxied=False, timeout_s=1800)
            two = training.run(folder / f"{model}-{turn}-proxied", proxied=True, timeout_s=1800)
            native.append(one.step_seconds)
            proxied.append(two.step_seconds)
            same.append(one.losses == two.losses)
        ratio = statistics.median(p / n for p, n in zip(proxied, native, strict=True))
        results.append(
            {"model": model, "native_s": native, "proxied_s": proxied, "ratio": ratio, "same_losses": same}
        )
        print(f"{model}: proxied / native {ratio:.3f}, losses the same in {sum(same)} of {ROUNDS} runs")
    return results


def recoveries(folder: Path) -> list[dict[str, Any]]:
    """Two ranks, one server killed in mid-minibatch."""
    results = []
    for number, place in enumerate(KILLS):
        training = Training("char_gpt.py", 2, 40)
        outcome = training.run(
            folder / f"recovery-{number}", proxied=True, drills=(f"kill-server rank=1 {place}",)
        )
        results += outcome.report["recoveries"]
        print(f"kill-server rank=1 {place}: {outcome.report['recoveries'][0]['total_s']:.3f} s")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="only say how many GPUs there are; fail if none")
    only_count = parser.parse_args().count
    count = gpus()
    if only_count:
        print(count)
        return int(count == 0)
    if count == 0:
        print("bench-gpu: skipped, PyTorch finds no GPU here")
        return 0
    os.environ["UNDERSTUDY_TEST_DRIVER"] = "cuda"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        with tempfile.TemporaryDirectory() as name:
            steps = step_times(Path(name))
            kills = recoveries(Path(name)) if count >= 2 else []
    except RunFailed as failure:
        print(f"bench-gpu: {failure}", file=sys.stderr)
        return 1
    if not kills:
        print("bench-gpu: recovery was not measured, it needs two GPUs")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps(
            {"machine": describe_machine(), "gpus": count, "steps": steps, "recoveries": kills}, indent=1
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
