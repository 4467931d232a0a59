"""The store of migratable workers: what c10d expects of one, and what a hostile client gets."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from understudy.recovery.rendezvous import LONGEST_KEY
from understudy.recovery.worker_store import SOCKET, WorkerStore


def text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def ask(store: WorkerStore, **request: Any) -> dict[str, Any]:
    return dict(json.loads(asyncio.run(store.answer(json.dumps(request).encode()))))


@pytest.fixture
def store(tmp_path: Path) -> WorkerStore:
    return WorkerStore(tmp_path)


def test_what_is_set_is_got_and_a_missing_key_has_no_value(store: WorkerStore) -> None:
    assert ask(store, do="get", key="a") == {"value": None}
    assert ask(store, do="set", key="a", value=text(b"\0x")) == {}
    assert ask(store, do="get", key="a") == {"value": text(b"\0x")}
    assert ask(store, do="check", keys=["a"]) == {"found": True}
    assert ask(store, do="check", keys=["a", "b"]) == {"found": False}
    assert ask(store, do="count") == {"count": 1}
    assert ask(store, do="delete", key="a") == {"found": True}
    assert ask(store, do="delete", key="a") == {"found": False}


def test_numbers_are_added_and_values_appended(store: WorkerStore) -> None:
    assert ask(store, do="add", key="n", amount=2) == {"count": 2}
    assert ask(store, do="add", key="n", amount=-5) == {"count": -3}
    ask(store, do="append", key="t", value=text(b"ab"))
    ask(store, do="append", key="t", value=text(b"c"))
    assert ask(store, do="get", key="t") == {"value": text(b"abc")}


def test_compare_set_does_what_tcp_store_does(store: WorkerStore) -> None:
    def compare(expected: bytes, desired: bytes) -> Any:
        return ask(store, do="compare", key="k", expected=text(expected), value=text(desired))["value"]

    assert compare(b"no", b"x") == text(b"no"), "a missing key is not what was expected"
    assert compare(b"", b"first") == text(b"first")
    assert compare(b"other", b"x") == text(b"first")
    assert compare(b"first", b"second") == text(b"second")


def test_what_must_not_be_done_twice_is_not_when_it_comes_again(store: WorkerStore, tmp_path: Path) -> None:
    successor = None
    for _ in range(2):
        for one in (store, successor or store):
            assert ask(one, do="add", key="n", amount=2, id="1") == {"count": 2}
            assert ask(one, do="append", key="t", value=text(b"ab"), id="2") == {}
            swap = {"expected": text(b""), "value": text(b"x"), "id": "3"}
            assert ask(one, do="compare", key="c", **swap) == {"value": text(b"x")}
            assert ask(one, do="get", key="t") == {"value": text(b"ab")}
        successor = WorkerStore(tmp_path)
    assert ask(store, do="add", key="n", amount=2, id="4") == {"count": 4}


def test_a_successor_serves_what_was_set_before(store: WorkerStore, tmp_path: Path) -> None:
    ask(store, do="set", key="a", value=text(b"1"))
    assert ask(WorkerStore(tmp_path), do="get", key="a") == {"value": text(b"1")}


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"nonsense", b"[]", b"7", b"{}", b"[" * 10**5,
        b'{"do": "melt", "key": "a"}', b'{"do": "get"}', b'{"do": [], "key": "a"}',
        b'{"do": "get", "key": 7}', b'{"do": "check", "keys": 7}',
        b'{"do": "set", "key": "a"}', b'{"do": "set", "key": "a", "value": "?"}',
        b'{"do": "set", "key": "a", "value": 7}', b'{"do": "add", "key": "a", "amount": "x"}',
        b'{"do": "add", "key": "a", "amount": null}',
        b'{"do": "add", "key": "a", "amount": 1, "id": 7}',
        json.dumps({"do": "add", "key": "a", "amount": 1, "id": "x" * 65}).encode(),
        json.dumps({"do": "get", "key": "x" * (LONGEST_KEY + 1)}).encode(),
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_gets_an_error_and_changes_nothing(
    line: bytes, store: WorkerStore
) -> None:
    assert "error" in json.loads(asyncio.run(store.answer(line)))
    assert ask(store, do="count") == {"count": 0}


def test_a_client_that_says_nothing_or_too_much_harms_nobody(
    tmp_path: Path, store: WorkerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.recovery.worker_store.LONGEST_LINE", 1 << 16)

    async def hostile() -> bytes:
        serving = asyncio.create_task(store.run())
        path = tmp_path / "store"
        while not path.exists():
            await asyncio.sleep(0)
        assert path.stat().st_mode & 0o777 == 0o600
        silent, _ = await asyncio.open_unix_connection(path), None
        _, flood = await asyncio.open_unix_connection(path)
        flood.write(b"x" * (1 << 20))
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"do": "count"}\n')
        answer = await asyncio.wait_for(reader.readline(), 30)
        for one in (silent[1], flood, writer):
            one.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return answer

    assert json.loads(asyncio.run(hostile())) == {"count": 0}


def test_stores_that_begin_at_once_leave_the_mask_of_new_files_alone(tmp_path: Path) -> None:
    """The second took the first one's for proxyd's own: from then on directories were 0600, so nobody's."""
    folders = [tmp_path / "a", tmp_path / "b"]

    async def begin() -> None:
        serving = []
        for folder in folders:
            folder.mkdir()
            serving.append(asyncio.create_task(WorkerStore(folder).run()))
        while not all((folder / SOCKET).exists() for folder in folders):
            await asyncio.sleep(0)
            assert mask() == before
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    before = mask()
    try:
        asyncio.run(begin())
        assert mask() == before
    finally:
        os.umask(before)


def mask() -> int:
    """That of this process."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("Umask"))
    return int(line.split()[1], 8)
