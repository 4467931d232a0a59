"""Stores with sets of made-up content, and places to mirror them to: a directory and an S3 server."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from understudy.recovery.snapshots import Store
from understudy.recovery.snapshots.stores.catalogue import StoredSet, find_set
from understudy.recovery.snapshots.stores.layout import store_path
from understudy.recovery.snapshots.tiers import MirrorTier

logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request hides what a test says

JOB = "job"
RUN = "understudy-1.rank-0"
EXTENTS = (120, 0, 5000, 70_001, 1)


class Stores:
    """Of a job: what a writer would have left there."""

    def __init__(self, directory: Path, ranks: int = 2, slots: int = 8) -> None:
        self.directory, self.ranks, self.slots = directory, ranks, slots

    def put(
        self, serial: int, *, run: str = RUN, step: int = 0, sizes: tuple[int, ...] = EXTENTS
    ) -> StoredSet:
        """A set of random bytes."""
        folder = self.directory / JOB / run
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for rank in range(self.ranks):
            path = store_path(folder, rank, 0)
            if not path.exists():
                slot_bytes = Store.needed_slot_bytes(sizes)
                Store.create(path, slots=self.slots, slot_bytes=-(-slot_bytes // 4096) * 4096)
            contents = [random.Random(f"{serial} {rank} {i}").randbytes(n) for i, n in enumerate(sizes)]
            with Store.open(path) as store:
                store.persist(
                    job=JOB, rank=rank, world=self.ranks, step=step or 10 * serial, serial=serial,
                    timeout_s=1,
                    extents=[(1, number + 1, content) for number, content in enumerate(contents)],
                )  # fmt: skip
        return find_set(folder, serial)


def contents_of(stored: StoredSet) -> list[list[bytes]]:
    """Of each extent of each rank."""
    found = []
    for _, part in sorted(stored.parts.items()):
        with part.open() as payload:
            buffers = [bytearray(count) for _, _, count in payload.extents(part.sequence)]
            payload.read_all(part.sequence, buffers)
            found.append([bytes(buffer) for buffer in buffers])
    return found


def assert_whole(url: str) -> list[StoredSet]:
    """Everything that counts there is complete in every byte.  Answers it, newest first."""
    place = MirrorTier(url)
    found = place.catalogue("")
    assert found.problems == ()
    for one in found.sets:
        assert place.problems_of(one) == []
    return list(found.sets)


def assert_private(folder: Path) -> None:
    """Nobody but the owner reads what lies in it."""
    paths = list(folder.rglob("*"))
    assert paths
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


class ObjectServer:
    """S3, as far as moto has it, on this machine; what it holds outlives stop()."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self.start()
        self.port = self._server.get_host_and_port()[1]

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def restart(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port)
        self.start()

    def client(self) -> boto3.client:
        return boto3.client("s3")


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """With credentials and address in the environment, where boto looks for them."""
    server = ObjectServer()
    told = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "very-secret-words",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        try:
            yield server
        finally:
            server.stop()


def new_bucket(server: ObjectServer) -> str:
    """URL of a place in it that is empty."""
    name = f"bucket-{os.urandom(6).hex()}"
    server.client().create_bucket(Bucket=name)
    return f"s3://{name}/a/prefix"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return new_bucket(request.getfixturevalue("server"))
    (tmp_path / "mirror").mkdir()
    return f"file://{tmp_path}/mirror"
