"""What proxyd tells Prometheus: ranks as they are, and everything it has ever recovered from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import TIMING, Timing
from understudy.recovery.config.settings import BadInput, parse_address
from understudy.recovery.state.counts import CopyCounts, LogCounts
from understudy.recovery.state.jobs import Job, Session
from understudy.recovery.state.recovery_progress import Stage

log = structlog.get_logger()

PARTS = ("detect", "restart", "copy", "communicators", "replay", "total")
SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
OF_SESSION: Mapping[str, tuple[str, Callable[[Session], float]]] = {
    "persist_trouble": ("1 while snapshots do not get to storage", lambda s: bool(s.persist_note)),
    "persist_interval": ("Steps between snapshots on storage; 0: time decides", lambda s: s.persist_interval),
    "persist_log_step": (
        "Step of the newest commit up to which the log is on storage",
        lambda s: s.logged_step,
    ),
    "persist_log_lag_bytes": (
        "Bytes of the log that are to follow there",
        lambda s: s.log_lag if s.logged_offset else 0,
    ),
    "persist_log_trouble": ("1 while a log does not get to storage", lambda s: bool(s.log_note)),
    "mirror_trouble": ("1 while snapshots do not get to the second tier", lambda s: bool(s.mirror_note)),
    "cpu_image_trouble": (
        "1 while no CPU image of a worker on another host is taken",
        lambda s: bool(s.cpu_image_note),
    ),
    "migratable": ("1 if the worker's process could be moved", lambda s: s.migratable == "yes"),
}
OF_RANK = {
    "step": "Minibatch that is being executed, from 1",
    "log_bytes": "Bytes of the log that are kept for replay",
    "cursor_lag": "Records appended and not yet executed",
    "live_bytes": "Bytes of the program's device buffers",
    "undo_bytes": "Bytes of pre-images",
    "shadow_bytes": "Bytes of private state shadowed in host memory",
    "snapshot_bytes": "Bytes of snapshots in host memory",
    "persisted_step": "Step of the newest snapshot that is durable on all ranks",
    "mirrored_step": "Step of the newest snapshot in the second tier",
    "cpu_image_step": "Step of the newest CPU image, with which it comes back if its host is lost",
    "backpressure": "1 while the worker waits for space in the log",
}

COPIES: Mapping[str, str] = {"persist": "storage", "mirror": "the second tier"}
OF_COPIES = {
    "copied": "Snapshots copied to {}",
    "bytes": "Bytes of snapshots copied to {}",
    "skipped": "Snapshots that were due and did not go to {}: no slot was free, or newer ones came",
    "failures": "Failures to copy snapshots to {}, or to remove there what is not to be kept",
}
"""Of each job's `persist` and `mirror`."""
OF_LOGS = {
    "bytes": "Bytes of the stored log, templates and descriptions included",
    "gaps": "Times that a log was let go of before it was stored: what lies before a gap is of no use",
    "failures": "Failures to store a log",
}
"""Of each job's `stored_log`."""
OF_JOB: Mapping[str, tuple[str, Callable[[Job], float]]] = {
    "recovery_under_way_seconds": (
        "Since the recovery or validation that is under way began; 0: none is",
        lambda job: job.progress.under_way_s,
    ),
    "recovery_waits": (
        "1 while a recovery waits for what has to come before it, as a host",
        lambda job: bool(job.waits_for),
    ),
    "not_replayable": (
        "1 if a validation showed that replay gives other bits",
        lambda job: bool(job.not_replayable),
    ),
}

MOST_JOBS = 100
"""Whose recoveries are counted, each with its labels; that many names of jobs a Prometheus can bear."""


class Metrics(Collector):
    """Counts and gauges of all jobs of a proxyd.  Counters outlive the jobs."""

    def __init__(
        self, jobs: Mapping[str, Job], membership: Callable[[], pb.Membership] = pb.Membership,
        timing: Timing = TIMING,
    ) -> None:  # fmt: skip
        self._jobs, self._timing = jobs, timing
        self._membership = membership
        self._seen: dict[str, tuple[int, int]] = {}
        self._seen_copies: dict[tuple[str, str], CopyCounts] = {}
        self._loop = asyncio.get_running_loop()
        self.registry = CollectorRegistry()
        self.registry.register(self)  # before the counters: a scrape counts first what is new
        self._recoveries = Counter(
            "understudy_recoveries", "Faults that were recovered from or given up",
            ("job", "rank", "device", "fault", "plan", "recovered"), registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "understudy_recovery_seconds", "How long each part of a recovery took",
            ("part",), buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._copied = Counter(
            "understudy_recovery_copied_bytes", "State copied from replicas, shadows and snapshots",
            registry=self.registry,
        )  # fmt: skip
        self._validations = Counter(
            "understudy_validations", "Minibatches executed twice by all ranks", registry=self.registry
        )

        self._copies = {
            (kind, name): Counter(f"understudy_{kind}_{name}", text.format(where), registry=self.registry)
            for kind, where in COPIES.items()
            for name, text in OF_COPIES.items()
        }
        self._stored_log = {
            name: Counter(f"understudy_persist_log_{name}", text, registry=self.registry)
            for name, text in OF_LOGS.items()
        }
        self._seen_logs: dict[str, LogCounts] = {}
        self._labels: dict[str, set[tuple[str, ...]]] = {}

    def absorb(self, job: Job) -> None:
        """Count what has come since the last time; to be called once more before a job is forgotten."""
        recoveries, validations = self._seen.get(job.name, (0, 0))
        for recovery in job.recoveries[recoveries:]:
            self._count(
                job.name, str(recovery.rank), job.device_of(recovery.rank), recovery.fault, recovery.plan,
                str(recovery.recovered).lower(),
            )  # fmt: skip
            for part in PARTS:
                self._seconds.labels(part).observe(getattr(recovery, f"{part}_s"))
            self._copied.inc(recovery.copied_bytes)
        self._validations.inc(_more(job.validations, validations))
        self._seen[job.name] = len(job.recoveries), job.validations
        for (kind, name), counter in self._copies.items():
            seen = self._seen_copies.get((job.name, kind), CopyCounts())
            counter.inc(_more(getattr(getattr(job, kind), name), getattr(seen, name)))
        for kind in COPIES:
            self._seen_copies[job.name, kind] = replace(getattr(job, kind))
        for name, counter in self._stored_log.items():
            seen_log = self._seen_logs.get(job.name, LogCounts())
            counter.inc(_more(getattr(job.stored_log, name), getattr(seen_log, name)))
        self._seen_logs[job.name] = replace(job.stored_log)

    def _count(self, job: str, *more: str) -> None:
        """A recovery.  Jobs have ever new names: of those that recovered longest ago it forgets."""
        labels = self._labels.pop(job, set()) | {more}
        self._labels[job] = labels
        self._recoveries.labels(job, *more).inc()
        while len(self._labels) > MOST_JOBS:
            oldest = next(iter(self._labels))
            for gone in self._labels.pop(oldest):
                self._recoveries.remove(oldest, *gone)

    def forget(self, job: Job) -> None:
        """A job has ended."""
        self.absorb(job)
        del self._seen[job.name]
        for kind in COPIES:
            del self._seen_copies[job.name, kind]
        del self._seen_logs[job.name]

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering must not ask for values."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """In a thread of the HTTP server; the jobs are looked at in their own."""
        try:
            look = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
            yield from look.result(self._timing.scrape_s)
        except TimeoutError:
            log.warning("a scrape of the metrics got no answer", within_s=self._timing.scrape_s)
        except (CancelledError, RuntimeError):  # proxyd is stopping
            return

    async def _look(self) -> list[Metric]:
        jobs = list(self._jobs.values())
        of_job = {
            name: GaugeMetricFamily(f"understudy_{name}", text, labels=["job"])
            for name, (text, _) in OF_JOB.items()
        }
        stage = GaugeMetricFamily(
            "understudy_recovery_stage", "1 for the stage of the recovery or validation that is under way",
            labels=["job", "stage"],
        )  # fmt: skip
        different = GaugeMetricFamily(
            "understudy_replies_different", "Replayed values that differ from those delivered before",
            labels=["job", "rank"],
        )  # fmt: skip
        of_rank = {
            name: GaugeMetricFamily(f"understudy_{name}", text, labels=["job", "rank", "device"])
            for name, text in OF_RANK.items()
        }
        of_session = {
            name: GaugeMetricFamily(f"understudy_{name}", text, labels=["job", "rank"])
            for name, (text, _) in OF_SESSION.items()
        }
        for job in jobs:
            self.absorb(job)
            for name, family in of_job.items():
                family.add_metric([job.name], OF_JOB[name][1](job))
            for one in Stage:
                stage.add_metric([job.name, one.value], one is job.progress.stage)
            for number, count in job.replies_different().items():
                different.add_metric([job.name, str(number)], count)
            for session in job.active_sessions():
                status, rank = session.status(), str(session.rank)
                for name, family in of_rank.items():
                    family.add_metric([job.name, rank, session.device], getattr(status, name))
                for name, family in of_session.items():
                    family.add_metric([job.name, rank], OF_SESSION[name][1](session))
        return [
            *of_job.values(), stage, different, self._trouble(), *of_rank.values(), *of_session.values(),
        ]  # fmt: skip

    def _trouble(self) -> GaugeMetricFamily:
        since_ms = self._membership().trouble_since_ms
        text = "Unix time since when this host is not registered with its cluster; 0: it is"
        return GaugeMetricFamily("understudy_membership_trouble_since_seconds", text, value=since_ms / 1000)


def _more(now: int, before: int) -> int:
    """How far a counter goes: a job that this host begins to lead counts from what its former leader knew."""
    return max(0, now - before)


def serve_metrics(metrics: Metrics, address: str) -> WSGIServer:
    """Answer scrapes at `address` in a thread until `shutdown()`; raises BadInput if it cannot be had."""
    host, port = parse_address(address)
    try:
        server, _ = start_http_server(port, host, metrics.registry)
    except OSError as problem:
        raise BadInput(f"cannot serve metrics at {address}: {problem.strerror}") from problem
    return server
