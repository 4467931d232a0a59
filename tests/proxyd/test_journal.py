"""What a proxyd leaves to its successor: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_disks import tiny_file_system

from understudy.protos import control_pb2 as pb
from understudy.recovery.agent.open_jobs import OpenJobs
from understudy.recovery.config.settings import DeviceSpec, Settings
from understudy.recovery.rendezvous.store import Notes, Store
from understudy.recovery.state.journaled_job import journaled_job, restored_job
from understudy.recovery.takeover import journal
from understudy.recovery.takeover.journal import JournalError
from understudy.recovery.takeover.journaling import Journaling


def signed(content: pb.Journal) -> bytes:
    body = content.SerializeToString()
    return b"understudy journal 1\n" + hashlib.sha256(body).digest() + body


def whole() -> pb.Journal:
    process = pb.Process(pid=7, start_ticks=8)
    server = pb.JournaledServer(process=process, socket="server-ab-1.sock", device="cpu:0")
    session = pb.JournaledSession(
        rank=0, world=2, device_index=0, asked_index=0, worker=process, directory="rank-0", server=server
    )
    job = pb.JournaledJob(name="job", sessions=[session])
    return pb.Journal(socket="/s", devices="cpu:2", proxyd=process, jobs=[job], servers=[server])


SPOILT: dict[str, Callable[[pb.Journal], Any]] = {
    "unknown device spec": lambda j: setattr(j, "devices", "tpu:1"),
    "names no proxyd": lambda j: j.ClearField("proxyd"),
    "fences a device": lambda j: j.fenced.update({9: "gone"}),
    "names job job twice": lambda j: j.jobs.append(pb.JournaledJob(name="job")),
    "no name for a job": lambda j: setattr(j.jobs[0], "name", "../../etc"),
    "is no log": lambda j: setattr(j.jobs[0].sessions[0], "directory", "../rank-0"),
    "is no device server's socket": lambda j: setattr(j.servers[0], "socket", "../server-ab-1.sock"),
    "a device server is no process": lambda j: setattr(j.servers[0].process, "pid", -1),
    "the worker of rank 0 is no process": lambda j: setattr(j.jobs[0].sessions[0].worker, "pid", 0),
    "there is no rank 0 of 0": lambda j: setattr(j.jobs[0].sessions[0], "world", 0),
    "holds a device that there is not": lambda j: setattr(j.jobs[0].sessions[0], "device_index", 2),
    "a device server of": lambda j: setattr(j.servers[0], "device", "floppy:0"),
    "is no directory of stores": lambda j: j.jobs[0].sessions[0].durable.append(pb.JournaledDurable(run="x")),
    "unknown drill": lambda j: j.jobs[0].drills.append(pb.JournaledDrill(drill=pb.Drill(kind="earthquake"))),
    "no worker of a host": lambda j: j.jobs[0].span.given_up.add(host="b"),
}


@pytest.mark.parametrize("complaint", SPOILT)
def test_a_journal_that_makes_no_sense_is_refused(complaint: str) -> None:
    journal.parse(signed(whole()))
    spoilt = whole()
    SPOILT[complaint](spoilt)
    with pytest.raises(JournalError, match=complaint):
        journal.parse(signed(spoilt))


def test_a_journal_that_was_cut_anywhere_or_has_one_other_bit_is_refused(tmp_path: Path) -> None:
    content = signed(whole())
    damaged = [content[:length] for length in range(len(content))]
    damaged += [
        content[:n] + bytes([content[n] ^ 1 << n % 8]) + content[n + 1 :] for n in range(len(content))
    ]
    for bad in [*damaged, content.replace(b"journal 1\n", b"journal 9\n"), content + b"\0"]:
        (tmp_path / "journal").write_bytes(bad)
        with pytest.raises(JournalError):
            journal.read(tmp_path)


def test_random_bytes_are_no_journal(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        body = chance.randbytes(chance.randrange(200))
        content = b"understudy journal 1\n" + hashlib.sha256(body).digest() + body
        with pytest.raises(JournalError):
            journal.parse(content)


def test_a_journal_is_found_as_it_was_written_and_only_if_it_is_a_file_of_ours(tmp_path: Path) -> None:
    journal.write(tmp_path, whole())
    assert journal.read(tmp_path) == whole()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    (tmp_path / "journal").rename(tmp_path / "elsewhere")
    (tmp_path / "journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError, match="cannot be read"):
        journal.read(tmp_path)


def test_what_the_store_held_is_there_after_a_death_but_for_a_line_that_was_cut(tmp_path: Path) -> None:
    async def scene() -> None:
        store = Store(Notes(tmp_path / "store"))
        await store.set("a/x", b"\0\xff")
        await store.add("a/n", 2)
        await store.set("b/y", b"1")
        store.forget("b")
        await store.set("a/x", b"2")

    asyncio.run(scene())
    with open(tmp_path / "store", "ab") as file:
        file.write(b'["a/z", "AA')
    asyncio.run(Store(Notes(tmp_path / "store")).set("a/w", b"3"))  # by a second one, which dies as well
    again = Store(Notes(tmp_path / "store"))
    assert asyncio.run(again.get("a/w", 0)) == b"3"
    assert again.holds(["a/x", "a/n"]) and not again.holds(["b/y"]) and not again.holds(["a/z"])
    assert asyncio.run(again.get("a/x", 0)) == b"2"
    assert asyncio.run(again.add("a/n", 1)) == 3


def test_a_store_whose_notes_find_no_room_goes_on_and_they_are_whole_once_there_is_some(
    tmp_path: Path,
) -> None:
    """A recovery ended with "No space left on device", and its job with it: a log had filled /dev/shm."""

    async def scene(place: Path) -> None:
        store = Store(Notes(place / "store"))
        await store.set("a/x", b"1")
        filler = place / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        for number in range(200):
            await store.set(f"a/k{number}", bytes(100))
        store.forget_generations("a", 7)
        assert store.delete("a/x") and store.holds(["a/k0", "a/k199"])
        filler.unlink()
        assert store.delete("a/k3")
        again = Store(Notes(place / "store"))
        assert len(again) == 199 and again.holds(["a/k0", "a/k199"]) and not again.holds(["a/x"])

    with tiny_file_system(tmp_path, "128k") as place:
        asyncio.run(scene(place))


def test_a_decision_and_a_repair_that_nobody_has_taken_up_yet_outlive_one_more_proxyd() -> None:
    written = pb.JournaledJob(
        name="job", decision=pb.JournaledDecision(generation=4, plan="rewind-in-place", targets={0: 7}),
        corruption=pb.JournaledCorruption(rank=1, message="rank 1 differs", trusted={1: 7}),
    )  # fmt: skip
    again = journaled_job(restored_job(written), None)
    assert (again.decision, again.corruption) == (written.decision, written.corruption)
    nothing = journaled_job(restored_job(pb.JournaledJob(name="job")), None)
    assert not nothing.HasField("decision") and not nothing.HasField("corruption")


def test_a_predecessors_journal_stays_until_all_of_it_is_adopted(tmp_path: Path) -> None:
    """Else a proxyd that dies while it adopts leaves a journal without the jobs that it has not come to."""
    leases: Any = SimpleNamespace(fenced={}, worn={}, draining=set())
    pool: Any = SimpleNamespace(gpus=(), servers=[])
    journal.write(tmp_path, whole())
    settings = Settings(DeviceSpec("cpu", 1), Path("/s"))
    journaling = Journaling(settings, OpenJobs(), leases, pool, tmp_path)
    journaling.note()
    assert (tmp_path / journal.FILE).read_bytes() == signed(whole())
    journaling.begin()
    assert not journal.parse((tmp_path / journal.FILE).read_bytes()).jobs
