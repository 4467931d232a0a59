"""Runs the scenarios of `--groups` on `--device`; writes what each kept, or how it failed, to `--out`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from scenario_groups import import_group
from script_scenario import GROUPS, Body, Run
from torch.optim.optimizer import register_optimizer_step_post_hook


class Minibatches:
    """Counts optimizer steps and, under the proxy, the records of each: that is where drills are aimed."""

    def __init__(self) -> None:
        self.done = 0
        self.records = [0]
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        self.done += 1
        self.records.append(records_so_far())


def client() -> Any:
    """The client's statistics, if this process runs under the proxy; never loads it."""
    return sys.modules.get("understudy.proxy_client._client")


def records_so_far() -> int:
    return int(client().statistics()["records"]) if client() else 0


def run_one(name: str, body: Body, device: str, minibatches: Minibatches) -> dict[str, Any]:
    first = minibatches.done
    with tempfile.TemporaryDirectory() as folder:
        run = Run(device, Path(folder))
        error = ""
        try:
            body(run)
        except Exception:  # noqa: BLE001 - it is this scenario's result
            error = traceback.format_exc()
    sizes = [
        b - a for a, b in zip(minibatches.records[first:], minibatches.records[first + 1 :], strict=False)
    ]
    if error:
        print(f"{name} failed: {error.strip().splitlines()[-1]}", flush=True)
    return {"kept": run.kept, "error": error, "steps_before": first, "records_of_steps": sizes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--groups", required=True, help="separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="one scenario by name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = arguments.groups.split(",")
    for group in groups:
        import_group(group)
    minibatches = Minibatches()
    results = {
        name: run_one(name, body, arguments.device, minibatches)
        for group in groups
        for name, body in GROUPS[group].items()
        if arguments.only in ("", name)
    }
    arguments.out.write_text(
        json.dumps({"scenarios": results, "cpu_branches": client().cpu_branches_used() if client() else {}})
    )


if __name__ == "__main__":  # data loaders that spawn workers import this file again
    main()
