"""What Prometheus is told."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import urllib.request
from pathlib import Path

import made_up_ranks
import proxied
import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxied import until
from running_proxyd import running_proxyd
from structlog.testing import capture_logs
from training_run import installed

from understudy.protos import control_pb2 as pb
from understudy.recovery.base.timing import Timing
from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.config.settings import BadInput, parse_address
from understudy.recovery.daemon.metrics import MOST_JOBS, Metrics
from understudy.recovery.state.jobs import Job

TINY = proxied.WORKLOADS / "tiny.py"


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(name, one label's value) -> value, once for every label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, label): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for label in ("", *sample.labels.values())
    }


def test_an_address_without_a_host_is_this_machine_only() -> None:
    assert parse_address("9400") == ("127.0.0.1", 9400)
    assert parse_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert parse_address("[::1]:9400") == ("::1", 9400)


@pytest.mark.parametrize("text", ["", "x", "0", "70000", "host:", "::1:9400"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match=r"127\.0\.0\.1:9400"):
        parse_address(text)


def test_proxyd_refuses_a_bad_address_before_it_starts() -> None:
    with pytest.raises(BadInput, match="is no address"):
        settings_of(["--devices", "cpu:1", "--metrics", "nowhere"])


def test_a_scrape_that_a_busy_proxyd_cannot_answer_is_a_warning() -> None:
    with asyncio.Runner() as runner, capture_logs() as said:

        async def made() -> Metrics:
            return Metrics({}, timing=Timing(scrape_s=0.05))

        metrics = runner.run(made())
        assert list(metrics.collect()) == []  # the loop does not run: it has no time for us
        runner.run(asyncio.sleep(0))
    assert [entry["log_level"] for entry in said] == ["warning"]


@pytest.mark.drawn(2)
def test_ranks_and_recoveries_are_told_and_counters_outlive_their_job(tmp_path: Path) -> None:
    port = a_free_port()
    with running_proxyd(tmp_path / "socket", 1, ("--metrics", str(port))) as proxyd:
        drill = ("--socket", str(proxyd.socket), "--drill", "kill-server rank=0 step=2 call=4")
        command = [*installed("proxyrun"), *drill, *proxied.python(TINY, "--fail", "hang")]
        unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, env=unbuffered, stdout=subprocess.PIPE, text=True) as run:
            try:
                assert run.stdout is not None
                assert any(line.startswith("hanging") for line in run.stdout)
                # The worker goes on once its replay is over, a moment before proxyd closes the recovery.
                under_way = ("understudy_recovery_under_way_seconds", "")
                until(lambda: scrape(port)[under_way] == 0, "no recovery under way")
                running = scrape(port)
                assert running["understudy_step", "cpu:0"] == 3
                assert running["understudy_not_replayable", ""] == 0
            finally:
                run.terminate()
        ended = scrape(port)
        assert ("understudy_step", "cpu:0") not in ended
        assert ended["understudy_recoveries_total", "server-died"] == 1
        assert ended["understudy_recovery_seconds_count", "replay"] == 1
        assert 0 < ended["understudy_recovery_seconds_sum", "total"] < 60


def test_recoveries_name_job_rank_and_device_and_old_jobs_are_forgotten() -> None:
    async def counted() -> list[dict[str, str]]:
        metrics = Metrics({})
        for number in range(MOST_JOBS + 20):
            job = made_up_ranks.a_job(2)
            job.name = f"job-{number}"
            job.recoveries += [
                pb.Recovery(fault="server-died", rank=rank, plan="give-up") for rank in (0, 1, 1)
            ]
            metrics.absorb(job)
            metrics.forget(job)
        families = metrics.registry._collector_to_names
        samples = [
            s for one in families if one is not metrics for family in one.collect() for s in family.samples
        ]
        return [s.labels | {"=": str(s.value)} for s in samples if s.name == "understudy_recoveries_total"]

    found = asyncio.run(counted())
    assert {labels["job"] for labels in found} == {f"job-{number}" for number in range(20, MOST_JOBS + 20)}
    device = made_up_ranks.a_job(2).sessions[1].device
    newest = {"job": "job-119", "rank": "1", "device": device, "fault": "server-died"}
    (of_rank_1,) = [labels for labels in found if newest.items() <= labels.items()]
    assert (of_rank_1["plan"], of_rank_1["recovered"], of_rank_1["="]) == ("give-up", "false", "2.0")


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*installed("proxyd"), "--devices", "cpu:1", "--socket", str(tmp_path / "socket"),
             "--metrics", str(port)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"cannot serve metrics at {port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_counted_of_stored_logs_outlives_its_job() -> None:
    with asyncio.Runner() as runner:

        async def made() -> Metrics:
            return Metrics({})

        metrics = runner.run(made())
    job = Job("job", None, [])
    job.stored_log.bytes = 5
    metrics.absorb(job)
    job.stored_log.bytes, job.stored_log.gaps = 7, 1
    metrics.forget(job)
    counted = {
        name: next(iter(counter.collect())).samples[0].value for name, counter in metrics._stored_log.items()
    }
    assert counted == {"bytes": 7, "gaps": 1, "failures": 0}


def test_counts_of_a_job_that_begin_again_lower_take_nothing_back() -> None:
    """As where this host begins to lead a job, whose former leader had told of less."""
    with asyncio.Runner() as runner:

        async def made() -> Metrics:
            return Metrics({})

        metrics = runner.run(made())
    job = Job("job", None, [], validations=5)
    for job.validations, job.stored_log.bytes in ((5, 100), (2, 10), (3, 20)):
        metrics.absorb(job)
    metrics.forget(job)
    (bytes_counted,) = [counter for name, counter in metrics._stored_log.items() if name == "bytes"]
    values = [next(iter(one.collect())).samples[0].value for one in (metrics._validations, bytes_counted)]
    assert values == [6, 110]
