"""`proxyd --mirror`: what is complete locally gets to the second tier, whatever happens there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import test_proxyd_recovery
from mirrors import ObjectServer, assert_private, assert_whole, new_bucket, object_server
from proxied import command_of, processes, until
from running_node import Node
from test_metrics import a_free_port, scrape
from test_persistence import STEPS, assert_bits, kill_everything, persisted_step

from understudy.recovery.base.own_modules import name_of
from understudy.recovery.snapshots.tiers import MirrorTier

pytestmark = pytest.mark.drawn(5)

variables = test_proxyd_recovery.variables  # the fixture


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


def mirroring_node(folder: Path, variables: dict[str, str], url: str, *options: str) -> Node:
    told = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    persist = ("--persist", str(folder / "store"), "--persist-every", "1", "--mirror", url)
    return Node(folder, variables | told, *persist, *options)


def mirrored_step(node: Node) -> int:
    return min((rank.mirrored_step for rank in node.status().ranks), default=0)


def note(node: Node) -> str:
    """What the status says of rank 0; empty before it has come, too."""
    return next((rank.note for rank in node.status().ranks if rank.rank == 0), "")


def uploaders() -> list[psutil.Process]:
    return [p for p in processes() if name_of("recovery.snapshots.remote.uploader") in command_of(p)]


def assert_mirror_bits(url: str, folder: Path) -> None:
    """The newest set there has the bits of a native run at its step."""
    place = MirrorTier(url)
    newest = place.catalogue("").sets[0]
    with place.readable(newest, folder / "fetched") as fetched:
        assert_bits(fetched)


def test_complete_snapshots_get_to_an_object_store_and_have_the_bits_of_their_step(
    tmp_path: Path, variables: dict[str, str], server: ObjectServer
) -> None:
    url = new_bucket(server)
    port = a_free_port()
    options = ("--keep-last", "2", "--metrics", str(port))
    with mirroring_node(tmp_path, variables, url, *options) as node:
        node.train(STEPS, STEPS)
        seen: set[int] = set()

        def several() -> bool:
            seen.add(mirrored_step(node))
            return len(seen - {0}) >= 4

        until(several, "four snapshots in the second tier")
        told = mirrored_step(node)
        assert note(node) == ""
        measured = scrape(port)
        assert measured["understudy_mirrored_step", "cpu:0"] >= told
        assert measured["understudy_mirror_copied_total", ""] >= 4
        assert measured["understudy_mirror_bytes_total", ""] > 0
        assert measured["understudy_mirror_failures_total", ""] == 0
        assert "very-secret-words" not in node.said()
        kill_everything(node)
    until(lambda: not uploaders(), "the end of the uploader")
    sets = assert_whole(url)
    assert 1 <= len(sets) <= 3  # two, and one whose predecessor was about to be removed
    assert sets[0].step >= told
    assert_mirror_bits(url, tmp_path)


def test_a_mirror_that_is_down_is_told_of_and_everything_else_goes_on_until_it_comes_back(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    mirror = tmp_path / "mirror"
    with mirroring_node(tmp_path, variables, f"file://{mirror}") as node:
        node.train(STEPS, STEPS)
        until(lambda: "no directory" in note(node), "trouble in the status")
        told = persisted_step(node)
        until(lambda: persisted_step(node) > told, "a newer one in the local stores")
        step = node.rank_status(0).step
        until(lambda: node.rank_status(0).step > step + 100, "more steps")
        assert mirrored_step(node) == 0 and not mirror.exists()
        mirror.mkdir()
        until(lambda: mirrored_step(node) > 0, "a snapshot in the second tier")
        until(lambda: note(node) == "", "an end of the complaint")
        kill_everything(node)
    assert_private(mirror)
    assert_whole(f"file://{mirror}")
    assert_mirror_bits(f"file://{mirror}", tmp_path)


def test_an_uploader_that_is_killed_is_followed_by_another(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "mirror").mkdir()
    url = f"file://{tmp_path}/mirror"
    with mirroring_node(tmp_path, variables, url) as node:
        node.train(STEPS, STEPS)
        until(lambda: mirrored_step(node) > 0, "a snapshot in the second tier")
        for uploader in uploaders():
            with contextlib.suppress(psutil.Error):
                uploader.kill()
        until(lambda: "its uploader ended" in note(node), "trouble in the status")
        told = mirrored_step(node)
        until(lambda: mirrored_step(node) > told, "a newer one")
        assert note(node) == ""
        assert_whole(url)
        kill_everything(node)
    assert_mirror_bits(url, tmp_path)
