"""The second tier: a set counts there when all of it is there, and comes back with every bit."""

from __future__ import annotations

import stat
from pathlib import Path

import fsspec
import mirrors
import pytest
from mirrors import JOB, RUN, ObjectServer, Stores, assert_whole, contents_of

from understudy.recovery.snapshots import StoreError
from understudy.recovery.snapshots.remote.mirror import Mirror
from understudy.recovery.snapshots.remote.second_tier import Remote
from understudy.recovery.snapshots.stores.retention import Retention
from understudy.recovery.snapshots.tiers import MirrorTier

pytestmark = pytest.mark.drawn(8)

ALL = Retention(keep_last=100)


server, url = mirrors.server, mirrors.url  # fixtures


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path / "stores")


def files_at(url: str) -> dict[str, int]:
    """Everything that is there, with its size."""
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    return {path: info["size"] for path, info in files.find(root, detail=True).items()}


def overwrite(url: str, path: str, content: bytes) -> None:
    files, _ = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    files.pipe_file(path, content)


def content_at(url: str, path: str) -> bytes:
    files, _ = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    return bytes(files.cat_file(path))


def test_a_set_comes_back_from_the_mirror_bit_for_bit(url: str, stores: Stores, tmp_path: Path) -> None:
    stored = stores.put(7, step=70)
    Mirror(Remote(url)).upload(stored)
    (found,) = assert_whole(url)
    assert (found.job, found.run, found.serial, found.step) == (JOB, RUN, 7, 70)
    assert (found.world, found.complete, found.time_ns) == (2, True, stored.time_ns)
    place = MirrorTier(url)
    (found,) = place.catalogue(JOB).sets
    with place.readable(found, tmp_path / "out") as fetched:
        assert contents_of(fetched) == contents_of(stored)
        assert all(not part.open().verify(0) for part in fetched.parts.values())
        folder = next(iter(fetched.parts.values())).path.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_larger_than_a_block_of_an_upload(url: str, stores: Stores, tmp_path: Path) -> None:
    stored = stores.put(1, sizes=(35 << 20, 100, 5 << 20))
    moved: list[int] = []
    Mirror(Remote(url)).upload(stored, moved.append)
    assert sum(moved) == stored.bytes and len(moved) == 2 * 3
    place = MirrorTier(url)
    (found,) = place.catalogue("").sets
    with place.readable(found, tmp_path / "out") as fetched:
        assert contents_of(fetched) == contents_of(stored)


def test_an_upload_that_was_cut_short_does_not_count_and_its_leavings_go(url: str, stores: Stores) -> None:
    mirror = Mirror(Remote(url))
    first, second = stores.put(1), stores.put(2)

    def give_up(_: int) -> None:
        raise OSError("the network is unreachable")

    mirror.upload(first)
    whole = files_at(url)
    with pytest.raises(OSError, match="unreachable"):
        mirror.upload(second, give_up)
    assert [one.serial for one in assert_whole(url)] == [1]
    mirror.tidy(JOB, RUN, ALL)
    assert files_at(url) == whole
    mirror.upload(second)
    assert [one.serial for one in assert_whole(url)] == [2, 1]


def test_a_set_that_its_store_has_overwritten_meanwhile_is_refused(
    url: str, stores: Stores, tmp_path: Path
) -> None:
    stored = stores.put(1)
    path = stored.parts[1].path
    content = bytearray(path.read_bytes())
    content[8192 + 4096 + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        Mirror(Remote(url)).upload(stored)
    assert not [name for name in files_at(url) if name.endswith("manifest.json")]


def test_every_damaged_byte_of_the_mirror_is_found(url: str, stores: Stores) -> None:
    Mirror(Remote(url)).upload(stores.put(1))
    Mirror(Remote(url)).upload(stores.put(2))
    place = MirrorTier(url)
    for path, count in files_at(url).items():
        if "/1/" not in path:
            continue
        content = content_at(url, path)
        for at in (0, count // 2, count - 1):
            overwrite(url, path, content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            found = place.catalogue("")
            damaged = {one.serial: place.problems_of(one) for one in found.sets}
            assert damaged.pop(2) == []
            assert found.problems or damaged[1], (path, at)
        overwrite(url, path, content[:-1])
        assert "/1: its manifest" in place.catalogue("").problems[0]
        overwrite(url, path, content)
    assert len(assert_whole(url)) == 2


def test_what_retention_does_not_keep_goes_and_nothing_that_is_not_ours(url: str, stores: Stores) -> None:
    mirror = Mirror(Remote(url))
    mirror.upload(stores.put(1))
    ours = next(path for path in files_at(url) if path.endswith("manifest.json"))
    folder = ours.rpartition("/")[0]
    root = folder.removesuffix(f"/{JOB}/{RUN}/1")
    others = [f"{root}/readme", f"{folder}/notes.txt", f"{root}/other/run/1/manifest.json"]
    for path in others:
        overwrite_new(url, path, b"not of this job")
    for serial in (2, 3, 4):
        mirror.upload(stores.put(serial))
        mirror.tidy(JOB, RUN, Retention(keep_last=2))
    found = MirrorTier(url).catalogue(JOB)
    assert [one.serial for one in found.sets] == [4, 3] and found.problems == ()
    assert {path for path in files_at(url) if "/1/" in path or "readme" in path} == set(others)


def overwrite_new(url: str, path: str, content: bytes) -> None:
    files, _ = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    if url.startswith("file"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    files.pipe_file(path, content)


def test_a_place_that_is_not_there_is_an_error_and_is_never_made(stores: Stores, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="there is no directory"):
        Mirror(Remote(f"file://{tmp_path}/unmounted")).upload(stores.put(1))
    assert not (tmp_path / "unmounted").exists()


def test_a_bucket_that_is_not_there_is_an_error_and_is_never_made(
    server: ObjectServer, stores: Stores
) -> None:
    with pytest.raises(OSError):
        Mirror(Remote("s3://no-such-bucket/x")).upload(stores.put(1))
    assert "no-such-bucket" not in [one["Name"] for one in server.client().list_buckets()["Buckets"]]
    with pytest.raises(OSError):
        MirrorTier("s3://no-such-bucket/x").catalogue("")
