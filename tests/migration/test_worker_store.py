"""The store of migratable workers: what c10d expects of one, and what a hostile client gets."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from understudy.proxy_client import proxyd_store
from understudy.recovery.rendezvous.store import LONGEST_KEY, MOST_DONE_OF_WORKERS, SPARE_NOTES, Notes, Store
from understudy.recovery.rendezvous.worker_store import LONGEST_ID, SOCKET, WorkerStore


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


def test_a_worker_from_an_image_undoes_nothing_that_others_have_done_since(tmp_path: Path) -> None:
    """It asks again what it has asked since; keys may have been set anew or deleted, and much have come."""

    def what_it_asks(store: WorkerStore) -> list[dict[str, Any]]:
        return [
            ask(store, do="set", key="a", value=text(b"1"), id="1"),
            ask(store, do="add", key="n", amount=1, id="2"),
            ask(store, do="set", key="gone", value=text(b"x"), id="3"),
            ask(store, do="delete", key="b", id="4"),
            ask(store, do="delete", key="never", id="5"),
        ]

    store = WorkerStore(tmp_path)
    ask(store, do="set", key="b", value=text(b"of another"))
    answers = what_it_asks(store)
    assert answers[1:] == [{"count": 1}, {}, {"found": True}, {"found": False}]
    ask(store, do="set", key="a", value=text(b"2"), id="other 1")
    ask(store, do="delete", key="n", id="other 2")
    ask(store, do="delete", key="gone", id="other 3")
    ask(store, do="set", key="b", value=text(b"anew"), id="other 4")
    ask(store, do="set", key="never", value=text(b"late"), id="other 5")

    async def be_busy() -> None:
        for number in range(5000):
            await store.store.add("busy", 1, f"busy {number}")

    asyncio.run(be_busy())
    heirs = Store(None, MOST_DONE_OF_WORKERS)
    for change in store.store.changes():
        heirs.take(change)
    for one in (store, WorkerStore(tmp_path)):
        assert what_it_asks(one) == answers
        assert ask(one, do="get", key="a") == {"value": text(b"2")}
        assert ask(one, do="check", keys=["n"]) == ask(one, do="check", keys=["gone"]) == {"found": False}
        assert ask(one, do="get", key="b") == {"value": text(b"anew")}
        assert ask(one, do="check", keys=["never", "b"]) == {"found": True}
    assert heirs.done("2") == 1 and heirs.done("other 2") == 1 and not heirs.holds(["gone"])


def test_notes_of_a_counter_that_grows_all_the_time_do_not(tmp_path: Path) -> None:
    async def count() -> None:
        store = Store(Notes(tmp_path / "notes"))
        most, last = 0, b""
        for number in range(3000):
            last = f"{number:04}".encode() * 256
            await store.set("heartbeat", last)
            most = max(most, (tmp_path / "notes").stat().st_size)
        assert SPARE_NOTES < most < 1.1 * SPARE_NOTES
        assert await Store(Notes(tmp_path / "notes")).get("heartbeat", 0) == last

    asyncio.run(count())


def test_ids_of_requests_do_not_depend_on_how_threads_take_turns() -> None:
    def ids(order: str) -> set[str]:
        numbers = proxyd_store._Numbers()
        numbers._name = "worker"
        contents: dict[str, tuple[str, str, dict[str, Any]]] = {
            "a": ("add", "n", {"amount": 1}),
            "b": ("add", "n", {"amount": 2}),
            "h": ("set", "heart", {"value": "AA"}),
        }
        return {numbers.next(*contents[letter]) for letter in order}

    assert len(ids("ahahah")) == 6, "each is another request"
    assert ids("ahahah") == ids("hhhaaa")
    assert ids("ab").isdisjoint(ids("ba")), "who has changed what it adds is not taken at its number's word"
    assert all(len(one) <= LONGEST_ID for one in ids("ahb"))


def test_a_store_that_waits_for_its_leader_is_asked_again_until_the_script_s_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 60 s it was, and then the script ended: etcd may be away for longer than that."""
    answers = [b'{"later": "nobody leads it"}'] * 20 + [b'{"count": 7}']
    asked: list[bytes] = []
    monkeypatch.setattr(proxyd_store, "_ask_once", lambda path, line: answered(answers[len(asked)], asked))

    def answered(answer: bytes, asked: list[bytes]) -> dict[str, Any]:
        asked.append(answer)
        return proxyd_store._checked(json.loads(answer))

    assert proxyd_store.ask(str(tmp_path), {"do": "count"}, 600.0, 0.2) == {"count": 7}
    asked.clear()
    with pytest.raises(RuntimeError, match=r"does not answer .* nobody leads it"):
        proxyd_store.ask(str(tmp_path), {"do": "count"}, 0.3, 0.2)


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
    monkeypatch.setattr("understudy.recovery.rendezvous.worker_store.LONGEST_LINE", 1 << 16)

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
