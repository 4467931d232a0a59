"""One program three times: natively on the CPU, under the proxy, and with a device server killed in the middle."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from catalogue import FOLDER, SCRIPTS, Program
from environments import ROOT, environment, version

sys.path.insert(0, str(ROOT / "bench"))

from training_run import RunFailed, execute, execute_natively

DATA = ROOT.parent / "shared" / "data"
TOLD = 3000
"""Characters of a run's output that are kept of one that fails."""


@dataclass(frozen=True)
class Ended:
    """One run: what each rank's training led to and the lines it kept, seconds of all of it."""

    ranks: dict[str, dict[str, Any]]
    seconds: float
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """Of one program, as the report has it.  `problem`: why it does not do what its row promises."""

    name: str
    version: str
    seed: int
    works: bool = False
    bits: bool | None = None
    """As natively; None: not compared."""
    fault: bool | None = None
    """The same with a server killed; None: there was nothing to kill in."""
    steps: int = 0
    replayed_s: float = 0.0
    ratio: float | None = None
    problem: str = ""
    commit: str = ""


def run(program: Program, seed: int | None = None, folder: Path | None = None) -> Outcome:
    """All three, in its environment or another `folder`; raises Unavailable where its libraries cannot be had."""
    folder = folder or environment(program.environment)
    seed = random.randrange(10**6) if seed is None else seed
    outcome = Outcome(program.name, version(folder, program.package), seed)
    try:
        proxied = _run(program, folder, _under_proxy(program, folder))
    except RunFailed as failure:
        outcome.problem = _refusal(program, str(failure))
        return outcome
    outcome.works, outcome.steps = True, int(proxied.report["steps"])
    if not any(one["tensors"] or one["kept"] for one in proxied.ranks.values()):
        outcome.problem = "it left nothing that could be compared"
        return outcome
    if program.fails:
        outcome.problem = "it works: its row says that it does not"
    try:
        if not program.not_natively:
            native = _run(program, folder, [], natively=True)
            outcome.bits = native.ranks == proxied.ranks
            outcome.ratio = proxied.seconds / native.seconds
        _with_a_fault(program, folder, outcome, proxied)
    except RunFailed as failure:
        outcome.problem = str(failure)[-TOLD:]
    if outcome.bits is False or outcome.fault is False:
        outcome.problem = outcome.problem or "other numbers"
    return outcome


def _with_a_fault(program: Program, folder: Path, outcome: Outcome, undisturbed: Ended) -> None:
    for place in places(undisturbed.report, random.Random(outcome.seed), program.ranks):
        command = _under_proxy(program, folder, ["--drill", f"kill-server {place}"])
        killed = _run(program, folder, command, expected=(0, 3))
        if killed.report["recoveries"]:
            break
    else:
        outcome.problem = "no fault struck"
        return
    recovered = [one["recovered"] for one in killed.report["recoveries"]]
    outcome.replayed_s = max(one["total_s"] for one in killed.report["recoveries"])
    outcome.fault = all(recovered) and killed.ranks == undisturbed.ranks


def places(report: dict[str, Any], draw: random.Random, ranks: int) -> list[str]:
    """Where a fault is to strike: amid the run, at a random record; then where there certainly is one.

    Of a program that commits nothing all records are of its first minibatch.  An optimizer of optimizers ends a
    minibatch of its own right after theirs, so that every other one is empty: then the next has that record.
    """
    rank, steps = draw.randrange(ranks), int(report["steps"])
    calls = max(2, int(report["calls_per_step"] if steps else report["records"]))
    step, call = max(1, steps // 2), draw.randrange(1, calls)
    amid = [f"rank={rank} step={step + more} call={call}" for more in ((0, 1) if steps > 1 else (0,))]
    return [*amid, f"rank={rank} step={step} call=1"]


def _refusal(program: Program, output: str) -> str:
    """Empty if it fails as its row says."""
    return "" if program.fails and program.refusal in output else output[-TOLD:]


def _under_proxy(program: Program, folder: Path, options: list[str] | None = None) -> list[str]:
    command = [str(folder / "bin" / "proxyrun"), "--devices", f"cpu:{program.ranks}"]
    return [*command, "--report", "{out}/report.json", *(options or [])]


def _run(
    program: Program,
    folder: Path,
    before: list[str],
    *,
    natively: bool = False,
    expected: tuple[int, ...] = (0,),
) -> Ended:
    """Raises RunFailed."""
    out = Path(tempfile.mkdtemp(prefix=f"understudy-guest-{program.name}-"))
    try:
        results = out / "results"
        results.mkdir()
        launcher, *its = program.launcher
        words = [*before, str(folder / "bin" / launcher), *its, str(FOLDER / "watch.py"), *_script(program)]
        command = [word.format(out=out, data=DATA) for word in words]
        settings = {"GUEST_RESULTS": str(results), "PATH": f"{folder / 'bin'}:/usr/bin:/bin", **OFFLINE}
        settings |= dict(program.native_variables) if natively else {}
        command = ["env", "-C", str(out), *(f"{name}={value}" for name, value in settings.items()), *command]
        begun = time.monotonic()
        # A drill that has not fired ends a run with 3.
        _ = (
            execute_natively(command, program.limit_s)
            if natively
            else execute(command, program.limit_s, expected=expected)
        )
        seconds = time.monotonic() - begun
        report = out / "report.json"
        return Ended(
            {file.stem: json.loads(file.read_text()) for file in sorted(results.iterdir())},
            seconds,
            json.loads(report.read_text()) if report.exists() else {},
        )
    finally:
        shutil.rmtree(out, ignore_errors=True)


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "YOLO_OFFLINE": "true",
           "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}  # fmt: skip
"""Nothing can be downloaded, and nothing is told to anybody."""


def _script(program: Program) -> list[str]:
    first, *rest = program.command
    return [*program.command] if first == "-m" else [str(SCRIPTS / first), *rest]


def as_row(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome)
