"""Cases made to differ, run by the conformance sweep's judge and shard under the proxy."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, sys.argv[1])

import databases
import shard
import torch
from cases import Case, Execution, Run
from observation import observe

turns = 0


def showing(compute: Callable[[str], Any]) -> Run:
    def run(device: str) -> Execution:
        result = compute(device)
        return Execution(lambda: observe((), [("result", result)]))

    return run


def flaky(device: str) -> torch.Tensor:
    global turns
    turns += 1
    return torch.full((3,), turns, device=device)


def crash(device: str) -> None:
    if device == "cuda":
        os.abort()


def hang(device: str) -> None:
    if device == "cuda":
        time.sleep(3600)


def late_error(device: str) -> torch.Tensor:
    """Natively an IndexError at once; on the device at a synchronisation, as the shapes are known by then."""
    table = torch.ones(4, 2, device=device)
    torch.index_select(table, 0, torch.tensor([1], device=device))
    return torch.index_select(table, 0, torch.tensor([9], device=device))


CASES: dict[str, tuple[Callable[[str], Any], str]] = {
    "same": (lambda device: torch.ones(3, device=device) / 3, "identical"),
    "one bit": (
        lambda device: torch.nextafter(torch.ones(3), torch.tensor(2.0 * (device == "cuda"))).to(device),
        "different",
    ),
    "another stride": (
        lambda device: (
            torch.ones(2, 2, device=device).T.clone().contiguous()
            if device == "cpu"
            else torch.ones(2, 2, device=device).T.clone()
        ),
        "different",
    ),
    "on the host": (lambda device: torch.ones(3), "different"),
    "flaky": (flaky, "flaky"),
    "late": (late_error, "identical"),
    "crash": (crash, "crash"),
    "behind the crash": (lambda device: torch.ones(1, device=device), "identical"),
    "hang": (hang, "hang"),
    "behind the hang": (lambda device: torch.ones(1, device=device), "identical"),
}


def cases(unit: databases.Unit) -> Iterator[Case]:
    for index, (name, (compute, _)) in enumerate(CASES.items()):
        yield Case(name, index, showing(compute))


shard.CASE_LIMIT_S = 5.0
shard._SOURCES["op_db"] = cases
entry = databases.Entry("op_db", "made up", None, (torch.float32,))
output = io.StringIO()
shard.Shard([databases.Unit(entry, torch.float32)], output).run()
result = json.loads(output.getvalue())
found = {name: status for name, counts in result["dense"].items() for status in counts}
found |= {finding["variant"]: finding["kind"] for finding in result["findings"]}
expected = {name: status for name, (_, status) in CASES.items()}
assert found == expected, (found, expected)
assert result["late"] == ["late 5"], result["late"]
sys.stdout.write("all verdicts are as they should be\n")
