"""A second tier that is not there is told of as proxyd starts, not with the first snapshot."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from mirrors import new_bucket, object_server
from structlog.testing import capture_logs

from understudy.recovery.snapshots.remote.first_contact import tell_of_first_contact


def told(url: str, within_s: float = 60.0) -> dict[str, Any]:
    with capture_logs() as said:
        asyncio.run(tell_of_first_contact(url, within_s))
    (line,) = said
    return dict(line)


def test_a_directory_that_is_mounted_answers_and_another_does_not(tmp_path: Path) -> None:
    assert told(f"file://{tmp_path}")["event"] == "the second tier answers"
    missing = told(f"file://{tmp_path}/absent")
    assert (missing["log_level"], missing["problem"]) == ("warning", f"there is no {tmp_path}/absent")


def test_a_bucket_that_does_not_exist_is_named_and_a_prefix_need_not_exist() -> None:
    with object_server() as server:
        assert told(new_bucket(server))["event"] == "the second tier answers"
        assert told("s3://nobucket/prefix")["problem"] == "there is no nobucket"


def test_a_tier_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_server(), socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        assert told("s3://bucket/prefix", 3.0)["problem"] == "it has not answered within 3 s"
