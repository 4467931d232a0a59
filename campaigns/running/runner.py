"""Makes the runs of a campaign that are not over yet, one after the other, and writes down what each was."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.campaigns.planning.faults import Fault
from understudy.campaigns.planning.variants import REFERENCE, VARIANTS, Launch
from understudy.campaigns.programs.own_faults import fired_marker
from understudy.campaigns.results import comparing, splitting
from understudy.campaigns.results.records import Checkpoints, FaultSeen, Run
from understudy.campaigns.results.stamps import of_ranks
from understudy.campaigns.running.commands import (
    ENVIRONMENT,
    LOSSES,
    PERSIST,
    REPORT,
    STORE,
    command_of,
    plan_of,
)
from understudy.campaigns.running.environments import Unavailable
from understudy.campaigns.running.manifest import Manifest, Planned
from understudy.campaigns.running.own_processes import kill_all
from understudy.campaigns.running.supervisor import OUTPUT, End, Ended, Order, supervise
from understudy.recovery.machine.runtime_directory import SHARED_MEMORY

LAST_LINES = 6
PREFIX, MEMORY = "us-", "memory"
"""Of a run's directory in shared memory, and the file that names it: a runner that is killed leaves it."""
ON_THE_WAY = "calls.json"
"""Of an undisturbed run under the proxy: the calls of a step, by which places of faults are reckoned."""


class Runner:
    """Of one campaign, whose manifest it holds."""

    def __init__(
        self,
        manifest: Manifest,
        told: Callable[[str], None] = lambda sentence: None,
        doing: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`told`: of each run that is over. `doing`: what is being done now."""
        self._manifest, self._campaign = manifest, manifest.campaign
        self._told, self._doing = told, doing

    def work(self) -> list[Run]:
        """All runs, those of before included."""
        kill_all(str(self._manifest.directory.resolve()))  # of a runner that was killed
        found = []
        for number, run in enumerate(self._manifest.runs, 1):
            record = self._manifest.record(run)
            if record is None:
                place = f"{number}/{len(self._manifest.runs)}"
                self._doing(f"{place} {run.name} {run.variant} seed {run.seed}")
                record = self._make(run)
                self._told(f"{place} {_sentence(record)}")
            found.append(record)
        return found

    def _make(self, run: Planned) -> Run:
        variant = VARIANTS[run.variant]
        faults = self._faults(run)
        _forget(self._manifest.folder(run))
        folder = self._manifest.begin(run)
        if why := self._impossible(run, faults):
            record = self._record(run, faults, status="impossible", why=why)
        elif variant.launch is Launch.PROXY and self._lacks_calls(run, faults):
            why = "its undisturbed run under the proxy failed, so that nobody knows how many calls a step has"
            record = self._record(run, faults, status="failed", why=why)
        else:
            try:
                record = self._run(run, faults, folder)
            except Unavailable as absent:
                record = self._record(run, faults, status="absent", why=str(absent))
        self._manifest.finish(run, record)
        return record

    def _lacks_calls(self, run: Planned, faults: Sequence[Fault]) -> bool:
        return any(fault.place for fault in faults) and self._calls(run) is None

    def _impossible(self, run: Planned, faults: Sequence[Fault]) -> str:
        variant = VARIANTS[run.variant]
        if faults and run.suite.command and variant.launch is not Launch.PROXY:
            return "nobody outside of a command of one's own knows which step it is in"
        return next((why for fault in faults if (why := variant.meets(fault))), "")

    def _faults(self, run: Planned) -> list[Fault]:
        if not run.disturbed:
            return []
        return sorted(run.suite.schedule.faults(self._campaign.steps, self._campaign.ranks, run.seed))

    def _run(self, run: Planned, faults: Sequence[Fault], folder: Path) -> Run:
        # Short: the sockets of a proxyd lie below it, and the kernel takes 107 bytes.
        memory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY))
        (folder / MEMORY).write_text(str(memory))
        in_memory = (run.suite.storage or self._campaign.storage) == "tmpfs"
        store = Path(f"{memory}-{STORE}") if in_memory else folder / STORE
        temporary = folder / "tmp"
        for made in (store, temporary):
            made.mkdir()
        plan_of(self._campaign, run, faults, folder, store).write()
        load = os.getloadavg()[0]
        again = VARIANTS[run.variant].launch is not Launch.PROXY
        try:
            ended = supervise(
                Order(
                    command=command_of(self._campaign, run, faults, folder, self._calls(run) or 1),
                    folder=folder,
                    mark=str(self._manifest.directory.resolve()),
                    environment={
                        **ENVIRONMENT,
                        "UNDERSTUDY_SHARED_MEMORY": str(memory),
                        "UNDERSTUDY_HISTORY": str(temporary / "history"),  # drills here are nobody's history
                        "TMPDIR": str(temporary),
                    },
                    restarts=self._campaign.restarts if again else 0,
                    limit=self._campaign.time_limit_s,
                )
            )
            ended.left_behind += [f"in shared memory: {path.name}" for path in sorted(memory.iterdir())]
            return self._judged(run, faults, folder, store, ended, load)
        finally:
            for made in (memory, store, temporary, folder / PERSIST):
                shutil.rmtree(made, ignore_errors=True)

    def _judged(
        self, run: Planned, faults: Sequence[Fault], folder: Path, store: Path, ended: Ended, load: float
    ) -> Run:
        if ended.end is not End.COMPLETED:
            why = f"{ended.end.value}: {_last_lines(folder / OUTPUT)}"
            return self._record(run, faults, folder, ended, status="failed", why=why, load=load)
        wall = ended.ended - ended.began
        try:
            stamps = of_ranks(folder)
            report = _report(folder / REPORT)
            kept = comparing.checkpoints_of(store)
            if run.suite.command:
                done = len((folder / LOSSES).read_text().split())
                course = splitting.of_command(report, wall, done)
            elif VARIANTS[run.variant].launch is Launch.PROXY:
                since_epoch = time.time() - time.monotonic()
                course = splitting.of_proxy(stamps, report, ended.began, wall, since_epoch)
            else:
                course = splitting.of_restarts(
                    stamps, ended.said, ended.attempts, ended.began, wall, _of_rank_0(kept, run.variant)
                )
        except (ValueError, TypeError, KeyError, OSError) as problem:  # what ranks were to write is damaged
            why = f"{type(problem).__name__}: {problem}"
            return self._record(run, faults, folder, ended, status="failed", why=why, load=load)
        fields: dict[str, Any] = {"load": load, "checkpoints": kept}
        self._keep_for_others(run, store, folder, report)
        if not run.suite.command:
            reference = self._reference(run)
            fields["samples"] = comparing.samples_of(folder, reference)
            if reference is not None:
                kept_there = self._reference(run, "blocking")
                fields["comparison"] = comparing.compared(
                    folder, store, stamps, reference, of_ranks(reference), kept_there
                )
        else:
            fields["comparison"] = self._compared_losses(run, folder)
        return self._record(
            run, faults, folder, ended, report,
            status="done", steps=course.steps, starting=course.starting, ending=course.ending,
            parts=course.parts, unaccounted=course.unaccounted, timeline=tuple(course.timeline),
            recoveries=tuple(course.recoveries), step_seconds=course.step_seconds, redone=course.redone,
            **fields,
        )  # fmt: skip

    def _record(
        self,
        run: Planned,
        faults: Sequence[Fault],
        folder: Path | None = None,
        ended: Ended | None = None,
        report: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Run:
        if ended is not None:
            fields |= {
                "wall": ended.ended - ended.began,
                "attempts": tuple(ended.attempts),
                "left_behind": tuple(ended.left_behind),
            }
        began = 0.0 if ended is None else ended.began
        return Run(
            suite=run.name,
            training=run.suite.training,
            data=run.suite.data or "",
            model=run.suite.model or run.suite.name,
            schedule=run.suite.schedule.kind if run.disturbed else "none",
            variant=run.variant,
            seed=run.seed,
            disturbed=run.disturbed,
            target=self._campaign.steps,
            exact=VARIANTS[run.variant].keeps_bits(list(faults)),
            faults=tuple(
                _seen(number, fault, folder, report or {}, began) for number, fault in enumerate(faults)
            ),
            **fields,
        )

    def _reference(self, run: Planned, variant: str = REFERENCE) -> Path | None:
        """The folder of the undisturbed run that it is compared with; None for that run itself."""
        other = self._manifest.shared(run, variant)
        record = self._manifest.record(other) if other is not None and other != run else None
        if other is None or record is None or record.status != "done":
            return None
        return self._manifest.folder(other)

    def _compared_losses(self, run: Planned, folder: Path) -> Any:
        """Of a user's command, whose losses are all that is known."""
        from understudy.campaigns.results.records import Comparison

        reference = self._reference(run)
        if reference is None:
            return None
        ours, theirs = ((one / LOSSES).read_text().split() for one in (folder, reference))
        pairs = [(comparing.number(a), comparing.number(b)) for a, b in zip(ours, theirs, strict=False)]
        return Comparison(
            parameters_equal=ours == theirs,
            losses_equal=ours == theirs,
            loss_difference=sum(abs(a - b) for a, b in pairs) / max(1, len(pairs)),
        )

    def _keep_for_others(self, run: Planned, store: Path, folder: Path, report: Mapping[str, Any]) -> None:
        """What runs behind it need of an undisturbed one."""
        if not run.shared:
            return
        calls = [calls for calls in report.get("recent_calls", ()) if calls]
        if calls:
            (folder / ON_THE_WAY).write_text(json.dumps(min(calls)))
        if run.variant == "blocking":
            import torch

            torch.save(comparing.at_checkpoints(store), folder / comparing.AT_CHECKPOINTS)

    def _calls(self, run: Planned) -> int | None:
        """Of a step under the proxy, as the undisturbed run has told; None: it has not."""
        told = self._manifest.shared(run, "transparent")
        path = self._manifest.folder(told) / ON_THE_WAY if told is not None else None
        return int(json.loads(path.read_text())) if path is not None and path.exists() else None


def _forget(folder: Path) -> None:
    """What an interrupted run has in shared memory."""
    try:
        name = Path((folder / MEMORY).read_text()).name
    except OSError:
        return
    if name.startswith(PREFIX):
        for path in (SHARED_MEMORY / name, SHARED_MEMORY / f"{name}-{STORE}"):
            shutil.rmtree(path, ignore_errors=True)


def _of_rank_0(kept: Checkpoints, variant: str) -> dict[str, float]:
    """What its training waited for, in parts: behind an overlapped checkpoint another thread writes."""
    if variant == "overlapped":
        return {"snapshot": kept.snapshot, "write": kept.enqueue + kept.backpressure}
    return {"snapshot": kept.snapshot, "write": kept.write}


def _seen(
    number: int, fault: Fault, folder: Path | None, report: Mapping[str, Any], began: float
) -> FaultSeen:
    at, fired = None, False
    if folder is not None and fired_marker(folder, number).exists():
        fired = True
        at = float(fired_marker(folder, number).read_text()) - began
    for entry in report.get("faults", ()):
        drill = fault.drill(1)
        if drill and drill.startswith(f"{entry['kind']} rank={entry['rank']} step={entry['step']} "):
            fired = fired or bool(entry["fired"])
    return FaultSeen(kind=fault.kind, step=fault.step, rank=fault.rank, place=fault.place, fired=fired, at=at)


def _report(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _last_lines(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return " | ".join(line.strip()[:200] for line in lines[-LAST_LINES:])


def _sentence(record: Run) -> str:
    name = f"{record.suite} {record.variant} seed {record.seed}"
    if record.status != "done":
        return f"{name}: {record.status}, {record.why[:200]}"
    return f"{name}: {record.wall:.1f} s, {record.goodput:.2f} steps/s, {len(record.recoveries)} recoveries"
