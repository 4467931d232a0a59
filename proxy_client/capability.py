"""What the device behind the virtual one is; the client decides and answers as that device's driver would."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Capability:
    """Mirrors `Capability` of protos/common.proto."""

    driver: str = "cpu"
    device_name: str = "Understudy virtual device"
    total_memory: int = 16 << 30
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1
    cudnn_version: int = 0


def _parse(values: object) -> Capability:
    if not isinstance(values, Mapping):
        raise ValueError(f"a capability must be an object, not {values!r}")
    known = {field.name: values[field.name] for field in fields(Capability) if values.get(field.name)}
    return Capability(**known)


def _from_environment() -> Capability:
    text = os.environ.get("UNDERSTUDY_CAPABILITY")
    return _parse(json.loads(text)) if text else Capability()


_current: Capability | None = None


def current() -> Capability:
    """proxyd's answer if there is a session, else what proxyrun announced."""
    global _current
    if _current is None:
        _current = _from_environment()
    return _current


def update(values: object) -> None:
    """Takes over what proxyd said when it opened the session."""
    global _current
    _current = _parse(values)
