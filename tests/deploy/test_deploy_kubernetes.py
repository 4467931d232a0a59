"""deploy/kubernetes: what the API server would take, what containers share, and their commands, run."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from manifests import OF_CUSTOM_KINDS, Pod, documents, pods, templates, words
from proxied import left_behind, until
from training_run import BIN, ROOT

from understudy.recovery.config.proxyd_settings import settings_of
from understudy.recovery.config.proxyrun_options import Order, parse

VERSIONS = ("1.33", "1.37")
"""Sidecars are stable from the first on; the second is the newest that the library knows."""
PODS = pods()
WITH_PROXYD = [pod for pod in PODS if pod.container("proxyd")]
WITH_TRAINER = [pod for pod in PODS if pod.container("proxyrun")]
SIDECARS = [pod for pod in WITH_PROXYD if pod in WITH_TRAINER]


def named(item: Any) -> str:
    return item.path.name if isinstance(item, Pod) else f"{item[0].name}: {item[1]['kind']}"


def check(document: dict[str, Any]) -> None:
    """Raises ValidationError, also for a field that there is not."""
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


of_kubernetes = [found for found in documents() if found[1]["kind"] not in OF_CUSTOM_KINDS]
of_others = [found for found in documents() if found[1]["kind"] in OF_CUSTOM_KINDS]


@pytest.mark.parametrize("found", of_kubernetes, ids=named)
def test_the_api_server_knows_every_field(found: tuple[Path, dict[str, Any]]) -> None:
    check(found[1])


@pytest.mark.parametrize("found", of_others, ids=named)
def test_pod_templates_in_kinds_of_others_are_right(found: tuple[Path, dict[str, Any]]) -> None:
    """The library carries no schemas of JobSet and Kubeflow Trainer: this is all of them that is checked."""
    inside = list(templates(found[1]))
    assert bool(inside) == (found[1]["kind"] != "TrainJob")
    for template in inside:
        metadata = {"name": "checked", "namespace": "understudy"}
        check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template})


def test_a_misspelt_field_would_be_noticed() -> None:
    (document,) = [
        one for path, one in documents() if path.name == "training-job.yaml" and one["kind"] == "Job"
    ]
    document["spec"]["template"]["spec"]["shareProcessNamespaces"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        check(document)


# ------------------------------------------------------------------ what worker and proxyd share
def ordered(arguments: list[str]) -> Order:
    """Of proxyrun, with what the kubelet fills in."""
    return parse([word.replace("$(JOB)", "training") for word in arguments])


def test_there_is_one_of_each_kind() -> None:
    assert len(SIDECARS) == 3 and len(WITH_PROXYD) == len(WITH_TRAINER) == 4


@pytest.mark.parametrize("pod", PODS, ids=named)
def test_processes_are_seen_by_their_pids(pod: Pod) -> None:
    assert pod.spec.get("shareProcessNamespace" if pod in SIDECARS else "hostPID") is True


@pytest.mark.parametrize("pod", PODS, ids=named)
def test_everything_runs_as_one_user_without_rights(pod: Pod) -> None:
    assert pod.spec["securityContext"]["runAsUser"] == 10001
    assert pod.spec["automountServiceAccountToken"] is False
    for name in ("proxyd", "proxyrun"):
        if container := pod.container(name):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "runAsUser" not in container["securityContext"]


@pytest.mark.parametrize("place", ["/dev/shm", "socket"])
@pytest.mark.parametrize("mode", ["sidecar", "node"])
def test_logs_and_socket_are_at_the_same_place_for_both(place: str, mode: str) -> None:
    together = [(pod, pod) for pod in SIDECARS]
    if mode == "node":
        together = [
            (p, t) for p in WITH_PROXYD for t in WITH_TRAINER if p not in SIDECARS and t not in SIDECARS
        ]
    assert together
    for of_proxyd, of_trainer in together:
        ours, theirs = of_proxyd.container("proxyd"), of_trainer.container("proxyrun")
        assert ours is not None and theirs is not None
        path = ordered(words(theirs)[1:]).socket
        assert path == settings_of(proxyd_options(ours, Path("/tmp"))).socket
        at = place if place != "socket" else str(path.parent.parent)
        volumes = of_proxyd.volume_at(ours, at), of_trainer.volume_at(theirs, at)
        assert volumes[0] is not None and volumes[1] is not None
        if mode == "sidecar":
            assert volumes[0] is volumes[1] and "emptyDir" in volumes[0]
        else:
            assert volumes[0]["hostPath"]["path"] == volumes[1]["hostPath"]["path"]


def test_a_trainjob_overrides_nothing_that_its_proxyd_needs() -> None:
    (job,) = [one for _, one in documents() if one["kind"] == "TrainJob"]
    order = ordered(job["spec"]["trainer"]["args"])
    assert order.socket == ordered(words(trainers()[0])[1:]).socket and order.job == "training"


def trainers() -> list[dict[str, Any]]:
    return [container for pod in SIDECARS if (container := pod.container("proxyrun"))]


@pytest.mark.parametrize("pod", SIDECARS, ids=named)
def test_a_sidecar_serves_before_the_trainer_and_nothing_kills_it_for_being_slow(pod: Pod) -> None:
    proxyd = pod.container("proxyd")
    assert proxyd is not None
    assert proxyd["restartPolicy"] == "Always" and proxyd["command"][0] == "supervise"
    assert "startupProbe" in proxyd and "livenessProbe" not in proxyd


def proxyd_options(container: dict[str, Any], folder: Path) -> list[str]:
    """With snapshots somewhere below `folder`."""
    given = [word for word in words(container) if word.startswith("--")]
    return [f"--persist={folder}/stored" if word.startswith("--persist=") else word for word in given]


# ------------------------------------------------------------------ carried out
def test_the_commands_of_all_pods_are_the_same() -> None:
    for name in ("proxyd", "proxyrun"):
        commands = [words(container) for pod in SIDECARS if (container := pod.container(name))]
        assert commands == [commands[0]] * len(SIDECARS)


@pytest.mark.drawn(4)
def test_the_commands_of_a_pod_train_together(tmp_path: Path) -> None:
    """supervise proxyd, the probe, proxyrun: as the kubelet runs them, in directories of this test."""
    pod = SIDECARS[0]
    proxyd, trainer = pod.container("proxyd"), pod.container("proxyrun")
    assert proxyd is not None and trainer is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()  # the volume
    for name in ("proxyd", "proxyrun", "recoveryctl", "torchrun"):
        (tmp_path / "bin" / name).symlink_to(BIN / name)
    (tmp_path / "bin" / "supervise").symlink_to(ROOT / "deploy" / "supervise")
    environment = os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "JOB": "training", "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    metrics = free_port()

    def here(command: list[str]) -> list[str]:
        steps = [word.replace("=1000", "=5") if word.startswith("--steps") else word for word in command]
        others = {
            "/run/understudy": f"{tmp_path}/run",
            "/snapshots": f"{tmp_path}/stored",
            "/examples": f"{ROOT}/examples",
            "$(JOB)": "training",
            "0.0.0.0:9400": metrics,
        }
        return [replaced(word, others) for word in steps]

    sidecar = subprocess.Popen(here(words(proxyd)), env=environment)
    probe = here(proxyd["startupProbe"]["exec"]["command"])
    try:
        until(succeeds(probe, environment), "the probe succeeds", 90)
        run = subprocess.run(here(words(trainer)), env=environment, timeout=200, check=False)
        assert run.returncode == 0
    finally:
        sidecar.terminate()
        assert sidecar.wait(60) == 0
    assert left_behind() == []


def succeeds(command: list[str], environment: dict[str, str]) -> Callable[[], bool]:
    return lambda: subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


def replaced(word: str, others: dict[str, str]) -> str:
    for old, new in others.items():
        word = word.replace(old, new)
    return word


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
