"""How many instructions a call costs the client, counted by callgrind: no clock, no noise.

    python bench/instructions.py                    # table beside the committed baseline
    python bench/instructions.py --write-baseline   # `make baseline`

Counted are the instructions of our own library alone: libc's differ with the processor (memcpy, for
example, is chosen at run time), PyTorch's and Python's with their versions. What our library asks of the
heap is counted in calls. The wake-up of the device server is switched off as far as it depends on timing.
"""

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from training_run import BIN, ROOT, RunFailed, execute, under_proxy

BASELINE = ROOT / "bench" / "baselines" / "instructions.json"
WORKLOAD = ROOT / "bench" / "workloads" / "steady_calls.py"
CALLS = 100  # as in the workload
LIBRARY = "libunderstudy_client"
HEAP = re.compile(r"^(operator new|malloc|calloc|realloc|posix_memalign|aligned_alloc)\b")


@dataclass(frozen=True)
class Cost:
    """Per call: instructions of our library, and its requests to the heap."""

    instructions: float
    allocations: float


def obstacle() -> str | None:
    """Why nothing can be counted here; None if it can."""
    if platform.machine() != "x86_64":
        return "the marks for callgrind are written for x86-64"
    if shutil.which("valgrind") is None:
        return "valgrind is not installed"
    return None


def torch_version() -> str:
    return version("torch").split("+")[0]


def measure() -> dict[str, Cost]:
    """Run the workload under callgrind. Raises RunFailed if it fails."""
    with tempfile.TemporaryDirectory(prefix="understudy-callgrind-") as name:
        folder = Path(name)
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={folder}/out", str(BIN / "python"), str(WORKLOAD)]
        # Through the environment of this process: proxyrun hands it on to the worker.
        previous = os.environ.get("UNDERSTUDY_SPIN_US")
        os.environ["UNDERSTUDY_SPIN_US"] = "0"
        try:
            output = execute(under_proxy(command, 1, folder / "report.json"), timeout_s=300)
        finally:
            if previous is None:
                del os.environ["UNDERSTUDY_SPIN_US"]
            else:
                os.environ["UNDERSTUDY_SPIN_US"] = previous
        costs = dict(parse(path.read_text()) for path in sorted(folder.glob("out.*"), key=_number))
    if not costs:
        raise RunFailed(f"callgrind wrote nothing:\n{output[-2000:]}")
    return costs


def _number(path: Path) -> int:
    return int(path.suffix.removeprefix("."))


def parse(text: str) -> tuple[str, Cost]:
    """One dump in callgrind's format: the mark's name, and the cost of a call.

    The format: `ob=`, `fn=` set the object and function that the following lines of cost belong to; `cfn=`
    and `calls=` precede one line with the cost of what was called, which is not the caller's own. A name in
    full is written once, `(7) name`, and as `(7)` from then on.
    """
    name, instructions, allocations = "?", 0, 0
    names: dict[tuple[str, str], str] = {}
    current_object = called = ""
    is_inclusive = False

    def resolve(kind: str, value: str) -> str:
        number, _, full = value.partition(" ")
        if full:
            names[kind, number] = full
        return names.get((kind, number), value)

    for line in text.splitlines():
        if line.startswith("desc: Trigger: Client Request: "):
            name = line.removeprefix("desc: Trigger: Client Request: ")
        elif match := re.match(r"^(c?ob|c?fn)=(.*)$", line):
            kind, value = match.groups()
            full = resolve(kind.removeprefix("c"), value)
            if kind == "ob":
                current_object = full
            elif kind == "cfn":
                called = full
        elif line.startswith("calls="):
            if LIBRARY in current_object and HEAP.match(called):
                allocations += int(line.removeprefix("calls=").split()[0])
            is_inclusive = True
        elif line and (line[0].isdigit() or line[0] in "+-*"):
            if LIBRARY in current_object and not is_inclusive:
                instructions += int(line.split()[1])
            is_inclusive = False
    return name, Cost(instructions / CALLS, allocations / CALLS)


def read_baseline() -> tuple[str, dict[str, Cost]]:
    """PyTorch's version, and the cost of each call then."""
    stored = json.loads(BASELINE.read_text())
    return stored["torch"], {name: Cost(**cost) for name, cost in stored["calls"].items()}


def write_baseline(costs: dict[str, Cost]) -> None:
    BASELINE.parent.mkdir(exist_ok=True)
    rows = {name: asdict(cost) for name, cost in costs.items()}
    BASELINE.write_text(json.dumps({"torch": torch_version(), "calls": rows}, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write-baseline", action="store_true")
    arguments = parser.parse_args()
    if (why := obstacle()) is not None:
        print(f"instructions cannot be counted here: {why}", file=sys.stderr)
        return 1
    costs = measure()
    before = read_baseline()[1] if BASELINE.exists() else {}
    print(f"{'instructions of the client per call':40s} {'now':>8s} {'baseline':>9s} {'heap':>6s}")
    for name, cost in costs.items():
        known = f"{before[name].instructions:9.0f}" if name in before else " " * 9
        print(f"{name:40s} {cost.instructions:8.0f} {known} {cost.allocations:6.2f}")
    if arguments.write_baseline:
        write_baseline(costs)
        print(f"written to {BASELINE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
