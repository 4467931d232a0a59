"""deploy/kubernetes as objects: documents, pods, and the command lines in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from training_run import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OF_CUSTOM_KINDS = ("JobSet", "TrainingRuntime", "TrainJob")
"""Their schemas are no part of Kubernetes; the pod templates in them are checked as such."""


def documents() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(KUBERNETES.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def templates(document: Any) -> Iterator[dict[str, Any]]:
    """Every pod template in a document: what is called `template` and holds containers."""
    if isinstance(document, dict):
        inner = document.get("template")
        if isinstance(inner, dict) and "containers" in inner.get("spec", {}):
            yield inner
        for value in document.values():
            yield from templates(value)
    elif isinstance(document, list):
        for value in document:
            yield from templates(value)


@dataclass(frozen=True)
class Pod:
    """Where it was found, and what it is."""

    path: Path
    spec: dict[str, Any]

    def container(self, name: str) -> dict[str, Any] | None:
        """proxyd, or the trainer: the one that runs proxyrun."""
        for container in [*self.spec.get("initContainers", []), *self.spec["containers"]]:
            if name in container.get("command", []):
                assert isinstance(container, dict)
                return container
        return None

    def volume_at(self, container: dict[str, Any], place: str) -> dict[str, Any] | None:
        """What a container has mounted at `place`."""
        for mount in container["volumeMounts"]:
            if mount["mountPath"] == place:
                (found,) = [volume for volume in self.spec["volumes"] if volume["name"] == mount["name"]]
                assert isinstance(found, dict)
                return found
        return None


def pods() -> list[Pod]:
    return [Pod(path, found["spec"]) for path, document in documents() for found in templates(document)]


def words(container: dict[str, Any]) -> list[str]:
    """The whole command line."""
    return [*container["command"], *container.get("args", [])]
