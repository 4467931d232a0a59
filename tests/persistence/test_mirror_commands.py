"""`recoveryctl snapshots list|verify|export` of the second tier."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import test_snapshot_export
import torch
from mirrors import JOB, Stores, assert_private, assert_whole, new_bucket, object_server
from test_persistence import ask
from test_snapshot_export import Stored, assert_same

from understudy.recovery.snapshots.remote.mirror import Mirror
from understudy.recovery.snapshots.remote.second_tier import Remote
from understudy.recovery.snapshots.stores.catalogue import read_catalogue

pytestmark = pytest.mark.drawn(5)

stored = test_snapshot_export.stored  # the fixture


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """With sets 1 and 2 of a job."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    stores = Stores(tmp_path / "stores")
    for serial in (1, 2):
        Mirror(Remote(folder.as_uri())).upload(stores.put(serial))
    return folder


def spoil(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def test_sets_of_a_url_are_listed_and_every_byte_is_verified(mirror: Path) -> None:
    listed, status = ask("list", mirror.as_uri(), "--json")
    assert status == 0 and listed["problems"] == []
    rows = [(row["job"], row["serial"], row["step"], row["complete"]) for row in listed["snapshots"]]
    assert rows == [(JOB, 2, 20, True), (JOB, 1, 10, True)]
    text, status = ask("list", mirror.as_uri())
    assert status == 0 and "2 of 2" in text
    verified, status = ask("verify", mirror.as_uri(), "--json")
    assert status == 0 and verified["newest"]["serial"] == 2


def test_damaged_sets_of_a_url_are_named_and_the_one_before_is_the_newest(mirror: Path) -> None:
    (part,) = mirror.glob("*/*/2/rank-1-*.part")
    spoil(part)
    verified, status = ask("verify", mirror.as_uri(), "--json")
    assert status == 1 and verified["newest"]["serial"] == 1
    damaged, whole = verified["snapshots"]
    assert whole["problems"] == [] and re.search(r"/2/rank-1-\S+: bytes \d+", damaged["problems"][0])
    (mirror / JOB / "understudy-1.rank-0" / "1" / "manifest.json").write_text("{}")
    verified, status = ask("verify", mirror.as_uri(), "--json")
    assert status == 1 and verified["newest"] is None
    assert "/1: its manifest cannot be used" in verified["problems"][0]


def test_a_snapshot_is_copied_from_stores_or_a_url_and_a_damaged_one_is_passed_over(
    mirror: Path, tmp_path: Path
) -> None:
    stores, third = tmp_path / "stores", tmp_path / "third"
    said, status = ask("copy", str(stores), third.as_uri())
    assert status == 2 and "there is no directory" in said and len(said.strip().splitlines()) == 1
    third.mkdir()
    (part,) = mirror.glob("*/*/2/rank-1-*.part")
    spoil(part)
    said, status = ask("copy", mirror.as_uri(), third.as_uri())
    assert status == 0 and "serial 2 (step 20) was passed over" in said and "step 10 of job" in said
    said, status = ask("copy", str(stores), third.as_uri())
    assert status == 0 and "step 20 of job" in said
    assert_private(third)
    copied = assert_whole(third.as_uri())
    assert [(one.serial, one.world) for one in copied] == [(2, 2), (1, 2)]
    assert [one.time_ns for one in copied] == [one.time_ns for one in read_catalogue(stores).sets]


def test_credentials_of_an_object_store_come_from_the_environment(tmp_path: Path) -> None:
    with object_server() as server:
        url = new_bucket(server)
        Mirror(Remote(url)).upload(Stores(tmp_path / "stores").put(1))
        verified, status = ask("verify", url, "--json")
        assert status == 0 and verified["newest"]["serial"] == 1


@pytest.mark.parametrize(
    "command, sentence",
    [
        (("list", "file:///no/such/place"), "cannot be read: there is nothing at file:///no/such/place"),
        (("verify", "nowhere://x"), "cannot be used"),
        (("export", "ftp://me:secret@host/x", "/tmp/never-made"), "by the environment"),
        (("copy", "/tmp", "s3://"), "is no URL of a directory"),
    ],
)
def test_what_cannot_be_a_second_tier_is_one_sentence(command: tuple[str, ...], sentence: str) -> None:
    said, status = ask(*command)
    assert status == 2 and sentence in said and len(said.strip().splitlines()) == 1, said
    assert "secret" not in said


@pytest.mark.parametrize("stored", [2], indirect=True, ids=["two ranks"])
def test_an_export_of_a_url_is_that_of_the_stores_and_passes_over_what_is_damaged(
    stored: Stored, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    sets = [one for one in read_catalogue(stored.store).sets if one.complete]
    for one in sets:
        Mirror(Remote(mirror.as_uri())).upload(one)
    said, status = ask("export", mirror.as_uri(), str(tmp_path / "out"))
    assert status == 0, said
    wanted, found = (
        json.loads((path / "snapshot.json").read_text()) for path in (stored.out, tmp_path / "out")
    )
    assert found == wanted
    for name in ("model.pt", "optimizer.pt"):
        assert_same(torch.load(tmp_path / "out" / name), torch.load(stored.out / name))
    (part,) = mirror.glob(f"*/*/{sets[0].serial}/rank-0-*.part")
    spoil(part)
    said, status = ask("export", mirror.as_uri(), str(tmp_path / "again"))
    assert f"serial {sets[0].serial} (step {sets[0].step}) was passed over" in said
    assert status == (0 if len(sets) > 1 else 2)
    assert not list(tmp_path.glob("*fetched*"))
