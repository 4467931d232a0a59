"""`make demo`: the same training three times, on two ranks: natively, under the proxy, and with a fault.

In the third run the device server of rank 1 is killed in the middle of a backward pass. The table at the
end says what the proxy costs, what the recovery took, and whether all losses are identical as bits.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from training_run import Outcome, RunFailed, Training

from understudy.recovery.text.tables import make_console

RANKS = 2
# Share of a minibatch's records after which the server dies. Forward, backward and the optimizer follow each
# other; this is well inside the backward pass of char_gpt.py. The table shows the phase the fault really hit.
BACKWARD = 0.6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library)")
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error("--steps must be at least 4: the fault needs steps before and after it")
    console = make_console()
    options = ["--log-every", "5", *(["--data", str(arguments.data)] if arguments.data else [])]
    training = Training("char_gpt.py", RANKS, arguments.steps, options)
    try:
        with tempfile.TemporaryDirectory(prefix="understudy-demo-") as folder:
            native, proxied, faulted, drill = run_three(console, training, Path(folder))
    except RunFailed as failure:
        console.print(failure, style="red", markup=False, highlight=False)
        return 1
    console.print(comparison(training, native, proxied, faulted))
    console.print(recovery(faulted, drill))
    return verdict(console, native, proxied, faulted)


def run_three(console: Console, training: Training, folder: Path) -> tuple[Outcome, Outcome, Outcome, str]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def run(title: str, proxied: bool, drills: tuple[str, ...] = ()) -> Outcome:
            task = progress.add_task(title, total=training.steps)
            outcome = training.run(
                folder / str(task),
                proxied=proxied,
                drills=drills,
                on_step=lambda step: progress.update(task, completed=step),
            )
            progress.update(task, completed=training.steps)
            return outcome

        native = run("natively, CPU and gloo", False)
        proxied = run("under the proxy", True)
        step = training.steps // 2 + 1
        call = max(1, int(BACKWARD * proxied.report["calls_per_step"]))
        drill = f"kill-server rank=1 step={step} call={call}"
        faulted = run(drill, True, (drill,))
    return native, proxied, faulted, drill


def comparison(training: Training, native: Outcome, proxied: Outcome, faulted: Outcome) -> Table:
    table = Table(title=f"{training.script}, {training.ranks} ranks, {training.steps} steps, dropout on")
    table.add_column("run")
    table.add_column("ms/step", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("losses to native")
    table.add_column("to undisturbed")
    table.caption = (
        f"median steps; losses compared as 32-bit patterns, {training.ranks} ranks x {training.steps} steps"
    )
    rows = (("native", native), ("proxied", proxied), ("server killed", faulted))
    for name, outcome in rows:
        table.add_row(
            name,
            f"{1000 * outcome.step_seconds:.1f}",
            f"{outcome.step_seconds / native.step_seconds:.2f}",
            "" if outcome is native else compare(outcome, native),
            compare(outcome, proxied) if outcome is faulted else "",
        )
    return table


def compare(one: Outcome, other: Outcome) -> str:
    """Whether the losses of all ranks and steps are the same 32-bit patterns."""
    pairs = [
        (step, a, b)
        for mine, theirs in zip(one.losses, other.losses, strict=True)
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True), start=1)
    ]
    different = [step for step, a, b in pairs if a != b]
    if not different:
        return "[green]identical[/]"
    return f"[red]{len(different)} of {len(pairs)} differ[/], first in step {min(different)}"


def recovery(faulted: Outcome, drill: str) -> Table:
    table = Table(title=f"recovery from: {drill}", caption_justify="left", min_width=60)
    table.add_column("part")
    found = faulted.report["recoveries"]
    for entry in found:
        table.add_column(f"{entry['fault']}, rank {entry['rank']}", justify="right")
    table.add_row("died in phase", *(entry["phase"] for entry in found))
    for part in ("detect", "restart", "copy", "communicators", "replay", "total"):
        name = "rebuild communicators" if part == "communicators" else part
        times = [f"{1000 * entry[f'{part}_s']:.1f} ms" for entry in found]
        table.add_row(name, *times, end_section=part == "replay")
    table.caption = "\n".join(f"{entry['plan']}: {entry['reason']}" for entry in found)
    return table


def verdict(console: Console, native: Outcome, proxied: Outcome, faulted: Outcome) -> int:
    """0 if the fault was recovered from and changed nothing."""
    if not faulted.report["recoveries"]:
        console.print("The report names no recovery: the drill did nothing.", style="red")
        return 1
    if faulted.losses != proxied.losses:
        console.print("The fault changed losses: recovery is not exact.", style="red")
        return 1
    if proxied.losses != native.losses:
        console.print("The fault changed nothing, but proxied and native losses differ.", style="red")
        return 1
    console.print("Every loss of every rank is the same 32-bit pattern in all three runs.", style="green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
