"""The jobs that are open on this host, and what is there of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from understudy.recovery.agent.job_controller import JobController

Part = TypeVar("Part")


class PerJob(Mapping[str, Part]):
    """One thing of each job that has it, by the job's name: a view of the controllers."""

    def __init__(
        self, controllers: Mapping[str, JobController], part: Callable[[JobController], Part | None]
    ) -> None:
        self._controllers, self._part = controllers, part

    def __getitem__(self, job: str) -> Part:
        found = self._part(self._controllers[job])
        if found is None:
            raise KeyError(job)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, one in self._controllers.items() if self._part(one) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OpenJobs:
    """By their names.  The agent opens and closes them; everybody may look."""

    def __init__(self) -> None:
        self.controllers: dict[str, JobController] = {}
        self.jobs = PerJob(self.controllers, lambda one: one.job)
        self.coordinators = PerJob(self.controllers, lambda one: one.coordinator)
        """Of the jobs that we lead."""
        self.deputies = PerJob(self.controllers, lambda one: one.deputy)
        """Of those that other hosts lead."""
        self.snapshots = PerJob(self.controllers, lambda one: one.snapshots)
        self.spans = PerJob(self.controllers, lambda one: one.spans)
        self.worker_stores = PerJob(self.controllers, lambda one: one.worker_store)
        """Of migratable jobs."""

    def ranks_running(self) -> dict[str, int]:
        """How many of each."""
        return {name: len(job.active_sessions()) for name, job in self.jobs.items()}
