"""A campaign's directory: what it is a campaign of, and which of its runs are over. Killed, it goes on."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.campaigns.files import content, short
from understudy.campaigns.planning.spec import Campaign, Suite, is_undisturbed
from understudy.campaigns.planning.variants import REFERENCE
from understudy.campaigns.results.records import Run
from understudy.durable import json_object, sync_folder
from understudy.recovery.base.errors import BadInput, Failure

MANIFEST = "campaign.json"
RECORD = "run.json"
LOCK = "lock"
LARGEST_FILE = 16 << 20


@dataclass(frozen=True)
class Planned:
    """One run that a campaign has. `suite`: of the undisturbed ones, whichever has their training first.

    `disturbed`: its suite has faults.
    """

    suite: Suite
    name: str
    variant: str
    seed: int
    disturbed: bool
    shared: bool = False
    """One of the undisturbed runs of its training, with which all others are compared."""

    @property
    def folder(self) -> str:
        return f"{self.name}--{self.variant}--{self.seed}"

    def as_fields(self) -> dict[str, Any]:
        return {"suite": self.name, "variant": self.variant, "seed": self.seed}


def planned_runs(campaign: Campaign) -> list[Planned]:
    """In the order in which they are made: seed by seed; of each training first the undisturbed ones, in
    turns, then what its suites have, in turns."""
    found = []
    for seed in campaign.seeds:
        chance = random.Random(f"turns {seed}")
        trainings: dict[str, list[Suite]] = {}
        for suite in campaign.suites:
            trainings.setdefault(suite.training, []).append(suite)
        for suites in trainings.values():
            plain = [
                Planned(suites[0], undisturbed_name(suites[0]), variant, seed, False, True)
                for variant in campaign.undisturbed
                if not suites[0].command or variant in ("bare", "transparent", "transparent+persist")
            ]
            struck = [
                Planned(suite, suite.name, variant, seed, not is_undisturbed(suite))
                for suite in suites
                for variant in campaign.variants_of(suite)
            ]
            chance.shuffle(plain)
            chance.shuffle(struck)
            plain.sort(key=lambda run: run.variant != REFERENCE)  # all others are compared with it
            found += [*plain, *struck]
    return found


def undisturbed_name(suite: Suite) -> str:
    """Of the runs without faults that suites of one training share."""
    return f"{suite.name if suite.command else suite.training}-undisturbed"


class Manifest:
    """The directory, held by one runner at a time."""

    def __init__(self, directory: Path, campaign: Campaign) -> None:
        self.directory, self.campaign = directory, campaign
        self.runs = planned_runs(campaign)

    @classmethod
    @contextmanager
    def of(cls, directory: Path, campaign: Campaign) -> Iterator[Manifest]:
        """Begun, or gone on with. Raises BadInput for another campaign's, another version's or machine's."""
        self = cls(directory, campaign)
        if (directory / MANIFEST).exists():
            self._must_be_the_same(read_manifest(directory))
        elif directory.exists() and any(directory.iterdir()):
            raise BadInput(f"{directory} is not empty and has no {MANIFEST}: name a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Failure(f"{directory} is being worked on by another campaign run") from None
        try:
            if not (directory / MANIFEST).exists():
                write_json(directory / MANIFEST, self._content())
            yield self
        finally:
            os.close(lock)

    def shared(self, run: Planned, variant: str) -> Planned | None:
        """The undisturbed run of the same training and seed that all of them share."""
        for one in self.runs:
            same = (one.suite.training, one.seed) == (run.suite.training, run.seed)
            if one.shared and same and one.variant == variant:
                return one
        return None

    def folder(self, run: Planned) -> Path:
        return self.directory / "runs" / run.folder

    def record(self, run: Planned) -> Run | None:
        """None: it is not over, or what is there cannot be read and is made anew."""
        path = self.folder(run) / RECORD
        if not path.exists():
            return None
        try:
            return read_run(path)
        except BadInput:
            return None

    def begin(self, run: Planned) -> Path:
        """An empty folder for it: what an interrupted run has left there goes."""
        folder = self.folder(run)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish(self, run: Planned, record: Run) -> None:
        write_json(self.folder(run) / RECORD, record.artifacts())

    def _content(self) -> dict[str, Any]:
        return {
            "campaign": self.campaign.model_dump(mode="json", by_alias=True),
            "digest": digest_of(self.campaign),
            "commit": version(),
            "machine": machine(),
            "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "runs": [run.as_fields() for run in self.runs],
        }

    def _must_be_the_same(self, found: dict[str, Any]) -> None:
        ours = self._content()
        for name, what in (
            ("digest", "another campaign"),
            ("commit", "another version of this project"),
            ("machine", "another machine"),
        ):
            if found.get(name) != ours[name]:
                raise BadInput(
                    f"{self.directory} has the runs of {what} ({str(found.get(name))[:80]}, this is "
                    f"{str(ours[name])[:80]}): they cannot be compared, so name a new directory"
                )


def digest_of(campaign: Campaign) -> str:
    text = json.dumps(campaign.model_dump(mode="json", by_alias=True), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def version() -> str:
    """Of what is installed; its end is the commit, as setuptools-scm writes it."""
    return importlib.metadata.version("torch-understudy")


def machine() -> dict[str, Any]:
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Raises BadInput."""
    path = directory / MANIFEST
    try:
        found = json_object(content(path, LARGEST_FILE))
    except (OSError, ValueError) as problem:
        raise BadInput(f"{path} is damaged: {short(problem)}; move {directory} away to begin anew") from None
    if not isinstance(found.get("runs"), list) or not isinstance(found.get("campaign"), dict):
        raise BadInput(f"{path} is damaged: it has no runs; move {directory} away to begin anew")
    return found


def read_run(path: Path) -> Run:
    """Raises BadInput."""
    try:
        return Run.model_validate(json_object(content(path, LARGEST_FILE)))
    except (OSError, ValueError) as problem:
        raise BadInput(f"{path} is damaged: {short(problem)}") from None


def write_json(path: Path, whole: Any) -> None:
    """All of it, or nothing: durable under its name."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        json.dump(whole, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)
