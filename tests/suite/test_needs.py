"""harness/needs.py: what cannot be had is one sentence, soon, and leaves nothing half made."""

from __future__ import annotations

import os
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needs
import pytest
from needs import Patience, Program
from proxied import until

ONE, OTHER = Program("one", "package-of-one"), Program("other", "package-of-other", "other.bin")
APT_GET = """
echo "$@" >> "$CALLS"
for word; do case $word in Dir::Cache=*) cache=${word#*=} ;; esac; package=$word; done
case " $* " in *" install "*) touch "$cache/archives/${package}_1_all.deb" ;; esac
"""
DPKG_DEB = """
mkdir -p "$3/usr/bin" "$3/lib64"
for name in one other.bin; do printf '#!/bin/sh\\necho this is %s' "$name" > "$3/usr/bin/$name"; done
printf '#!/bin/sh\\nshift 2; exec sh "$@"' > "$3/lib64/ld-linux-test.so.2"
chmod 755 "$3"/*/*  "$3"/usr/bin/*
"""
INSTALL_CRIU = 'mkdir -p "$2/bin"; printf "#!/bin/sh" > "$2/bin/criu"; chmod 755 "$2/bin/criu"'
NO_NETWORK = "Temporary failure resolving 'deb.debian.org'"


class Machine:
    """A checkout, and a PATH on which programs are what a test wants them to be."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.calls = folder / "main", folder / "bin", folder / "calls"
        (self.root / "deploy").mkdir(parents=True)
        self.bin.mkdir()
        self.script(self.root / needs.SCRIPT, INSTALL_CRIU)
        self.script(self.bin / "apt-get", APT_GET)
        self.script(self.bin / "dpkg-deb", DPKG_DEB)

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def left(self) -> list[str]:
        """In build/, but for what is empty and for a lock."""
        found = (self.root / "build").rglob("*")
        return sorted(file.name for file in found if file.is_file() and file.name not in ("lock", "apt.conf"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(needs, "PROGRAMS", (ONE, OTHER))
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(made.calls))
    monkeypatch.delenv(needs.CRIU, raising=False)
    return made


def test_what_can_be_had_is_found_and_not_fetched_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert needs.main(machine.root) == 0
    variables = needs.environment(machine.root)
    assert subprocess.check_output([variables["UNDERSTUDY_CRIU"]]) == b""
    for name, said in (("one", b"this is one\n"), ("other", b"this is other.bin\n")):
        assert subprocess.check_output([name], env=os.environ | variables) == said
    calls = machine.calls.read_text()
    assert len(calls.splitlines()) == 2
    capfd.readouterr()
    assert needs.main(machine.root) == 0
    assert capfd.readouterr() == ("", "") and machine.calls.read_text() == calls


def test_what_a_person_has_set_and_what_the_machine_has_comes_first(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.script(machine.bin / "one", "echo the machine has it")
    monkeypatch.setenv(needs.CRIU, "/a/persons/criu")
    assert needs.main(machine.root) == 0
    variables = needs.environment(machine.root)
    assert needs.CRIU not in variables
    assert variables["PATH"].startswith(os.environ["PATH"] + ":")
    assert "package-of-one" not in machine.calls.read_text()
    monkeypatch.setenv("PATH", variables["PATH"])
    assert needs.environment(machine.root) == {"PATH": variables["PATH"]}, "in a process below, too"


def test_without_apt_all_is_one_sentence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    machine.script(machine.root / needs.SCRIPT, "echo 'install-criu: there is no apt-get here' >&2; exit 2")
    assert needs.main(machine.root) == 0
    assert capfd.readouterr().err == (
        "test-needs: one, other, CRIU cannot be had, and tests that want it are skipped: "
        "there is no apt-get here\n"
    )
    assert machine.left() == []


def test_without_a_network_all_is_one_sentence(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    fails = 'for word; do last=$word; done; echo "E: Failed to fetch http://x/$last  {}" >&2; exit 100'
    machine.script(machine.bin / "apt-get", fails.format(NO_NETWORK))
    machine.script(machine.root / needs.SCRIPT, fails.format(NO_NETWORK))
    assert needs.main(machine.root) == 0
    assert capfd.readouterr().err == (
        f"test-needs: one, other, CRIU cannot be had, and tests that want it are skipped: {NO_NETWORK}\n"
    )
    assert machine.left() == []


def has_ended(pid: str) -> bool:
    """Or waits for whoever has to take note of that."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_an_apt_that_never_answers_is_ended_with_all_it_started_and_not_asked_again(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.script(machine.bin / "apt-get", f'{APT_GET}\nsleep 1000 & echo $! >> "{machine.root}/pid"; wait')
    assert needs.main(machine.root, Patience(command_s=0.3)) == 0
    assert capfd.readouterr().err == (
        "test-needs: one, other, CRIU cannot be had, and tests that want it are skipped: "
        "apt-get did not end within 0 s\n"
    )
    (pid,) = (machine.root / "pid").read_text().split()
    until(lambda: has_ended(pid), "what apt-get had started ended")  # it was killed, which takes its time
    assert machine.left() == []


def test_an_archive_that_cannot_be_unpacked_leaves_nothing_and_others_go_on(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    refuses = 'case $2 in *of-one*) echo "dpkg-deb: error: it is cut off" >&2; exit 2;; esac'
    machine.script(machine.bin / "dpkg-deb", f"{DPKG_DEB}\n{refuses}")
    assert needs.main(machine.root) == 0
    assert capfd.readouterr().err == (
        "test-needs: one cannot be had, and tests that want it are skipped: dpkg-deb: error: it is cut off\n"
    )
    assert "one" not in {path.name for path in (machine.root / "build").glob("needs/*/*/bin/*")}
    assert not list((machine.root / "build").rglob("*.new"))
    machine.script(machine.bin / "dpkg-deb", DPKG_DEB)
    assert needs.main(machine.root) == 0, "what is missing is tried again"
    assert needs.missing(machine.root) == []


def test_a_place_that_cannot_be_written_is_one_sentence(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    (machine.root / "build").touch()
    assert needs.main(machine.root) == 0
    said = capfd.readouterr().err
    assert said.startswith("test-needs: one, other, CRIU cannot be had") and said.count("\n") == 1


def test_what_two_want_at_once_is_fetched_once(machine: Machine) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: needs.unpacked(machine.root, ONE, Patience()), range(2)))
    assert found[0] == found[1] and found[0].exists()
    assert len(machine.calls.read_text().splitlines()) == 1


def test_what_an_older_list_unpacked_is_not_used_and_goes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert needs.main(machine.root) == 0
    before = needs.unpacked(machine.root, ONE, Patience())
    monkeypatch.setattr(needs, "PROGRAMS", (ONE, Program("other", "package-of-other", "one")))
    assert needs.main(machine.root) == 0
    assert not before.exists()
    variables = os.environ | needs.environment(machine.root)
    assert subprocess.check_output(["other"], env=variables) == b"this is one\n"
