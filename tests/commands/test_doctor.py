"""What `recoveryctl doctor` says of machines, and of this one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_commands import run

from understudy.recovery.machine import criu
from understudy.recovery.machine.criu import Criu, candidates, find, parse_version
from understudy.recovery.migration.preflight.doctor import Check, Machine, Verdict, examine
from understudy.recovery.migration.process.namespaces import pid_here, pid_namespace, pids_of

SOUND = Machine(
    criu=Criu(Path("/opt/criu"), "PATH", (4, 1, 1)), criu_trouble="", kernel="6.18.44-x",
    capabilities=2**41 - 1, ptrace_scope=0, namespace_trouble="", shared_memory_bytes=16 << 30,
    shared_memory_free=15 << 30,
    persist="/disk", persist_engine="uring", torch="2.13.0+cpu", built_for="2.13.0",
)  # fmt: skip


def bad(machine: Machine) -> Check:
    """The only check that is bad."""
    found = [check for check in examine(machine) if check.verdict is Verdict.BAD]
    assert len(found) == 1, found
    assert found[0].fix, "what is bad has a fix"
    return found[0]


def test_a_sound_machine_needs_nothing() -> None:
    checks = examine(SOUND)
    assert {check.verdict for check in checks} == {Verdict.GOOD}
    assert not any(check.fix for check in checks)


@pytest.mark.parametrize(
    ("machine", "name", "fix"),
    [
        (replace(SOUND, criu=None), "CRIU", "deploy/install-criu"),
        (replace(SOUND, criu=Criu(Path("/x"), "PATH", (3, 17, 1))), "CRIU", "4.1 or newer is needed"),
        (replace(SOUND, criu=Criu(Path("/x"), "PATH", (), "no such file")), "CRIU", "deploy/install-criu"),
        (replace(SOUND, criu_trouble="Error: no TIMERFD"), "criu check", "as root"),
        (replace(SOUND, kernel="5.4.0-99"), "kernel", "from Linux 5.9 on"),
        (replace(SOUND, kernel="nonsense"), "kernel", "from Linux 5.9 on"),
        (replace(SOUND, capabilities=2**41 - 1 - (1 << 21)), "capabilities", "--cap-add SYS_ADMIN"),
        (replace(SOUND, ptrace_scope=3), "ptrace", "ptrace_scope=2 or less"),
        (replace(SOUND, namespace_trouble="Operation not permitted"), "pid namespaces", "SYS_ADMIN"),
        (replace(SOUND, shared_memory_free=60 << 20), "/dev/shm", "size=16G /dev/shm"),
        (replace(SOUND, persist_trouble="Permission denied"), "--persist /disk", "writable"),
        (replace(SOUND, torch="2.12.0"), "PyTorch", "torch==2.13.0"),
    ],
)  # fmt: skip
def test_each_lack_is_named_with_its_fix(machine: Machine, name: str, fix: str) -> None:
    found = bad(machine)
    assert found.name == name
    assert fix in found.fix


def test_what_is_only_slower_is_a_note() -> None:
    machine = replace(SOUND, persist_engine="direct", shared_memory_free=2 << 30)
    notes = {check.name: check.fix for check in examine(machine) if check.verdict is Verdict.NOTE}
    assert set(notes) == {"--persist /disk", "/dev/shm"}
    assert all(notes.values())


# ------------------------------------------------------------------ which CRIU
@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version: 4.1.1\nGitID: x", (4, 1, 1)),
        ("Version: 3.17\n", (3, 17)),
        ("warning\nVersion: 4.2", (4, 2)),
        ("", ()),
        ("version 4.1", ()),
        ("Version: " + "9" * 5000, ()),
    ],
)
def test_versions_are_read_or_not_known(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def a_criu(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    file = folder / "criu"
    file.write_text(f"#!/bin/sh\necho 'Version: {version}'\n")
    file.chmod(0o755)
    return file


def test_ours_is_found_before_the_systems_and_a_named_one_is_meant(tmp_path: Path) -> None:
    old = a_criu(tmp_path / "bin", "3.17.1")
    ours = a_criu(tmp_path / "home/.local/share/understudy/criu/bin", "4.1.1")
    variables = {"HOME": str(tmp_path / "home"), "PATH": str(old.parent)}
    assert [path for path, _ in candidates(None, variables)][-2:] == [ours, old]
    found = find(variables=variables)
    assert found is not None and found.recent
    named = find(variables=variables | {criu.VARIABLE: str(old)})
    assert named == Criu(old, criu.VARIABLE, (3, 17, 1))
    assert find(ours, variables | {criu.VARIABLE: str(old)}) == Criu(ours, "--criu", (4, 1, 1))


def test_a_criu_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    found = find(tmp_path / "none")
    assert found is not None
    assert not found.recent
    assert "No such file" in found.trouble


# ------------------------------------------------------------------ namespaces
def test_a_pid_of_our_own_namespace_is_itself() -> None:
    assert pid_here(4711, pid_namespace()) == 4711
    assert pid_here(4711, 1) == 0, "no process of that namespace can be seen"


def test_pids_in_namespaces_are_read_from_the_outermost() -> None:
    assert pids_of("Name:\tx\nNSpid:\t700\t2\n") == [700, 2]
    assert pids_of("Name:\tNSpid: 3\n") == []


# ------------------------------------------------------------------ this machine
def test_doctor_tells_programs_what_it_tells_people(tmp_path: Path) -> None:
    done = run("recoveryctl", "doctor", "--json", "--persist", str(tmp_path))
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {"CRIU", "kernel", "capabilities", "/dev/shm", f"--persist {tmp_path}", "PyTorch"} <= set(checks)
    assert checks["PyTorch"]["verdict"] == "good"
    assert os.listdir(tmp_path) == []
    assert done.returncode == int(any(check["verdict"] == "bad" for check in checks.values()))


def test_doctor_ends_with_1_and_the_fix_if_something_is_bad(tmp_path: Path) -> None:
    done = run("recoveryctl", "doctor", "--criu", str(tmp_path / "none"), COLUMNS="200")
    assert done.returncode == 1
    assert "deploy/install-criu" in done.stdout
