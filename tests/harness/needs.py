"""What tests need beyond `make setup`, put below build/ where it can be had: CRIU, etcd, Debian's programs.

    python tests/harness/needs.py      quickly a no-op when all is there

Nothing is installed: apt downloads (from the machine's mirrors, with its checks), and packages are unpacked
below build/.  What cannot be had is named in a sentence, and the exit status is 0 all the same: tests that
want it are skipped, and say so.  Only the standard library is used: this runs without .venv, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CRIU = "UNDERSTUDY_CRIU"
SCRIPT = Path("deploy", "install-criu")
APT_PATIENCE = {"Acquire::Retries": "0", "Acquire::http::Timeout": "10", "Acquire::https::Timeout": "10"}
COMMAND_S, ALL_S = 60.0, 150.0
"""For one command, and for everything: a network that never answers takes no longer."""
END_S = 5.0
"""For a command to tidy up when it is told to end."""
BINARIES = ("usr/bin", "bin", "usr/sbin", "sbin")
LIBRARIES = ("lib/*-linux-gnu*", "usr/lib/*-linux-gnu*", "usr/lib/*-linux-gnu*/systemd")
LOADERS = tuple(
    f"{top}{place}/ld-linux-*.so.*" for top in ("", "usr/") for place in ("lib/*-linux-gnu*", "lib*")
)


@dataclass(frozen=True)
class Program:
    """That tests look for on PATH, and skip themselves without."""

    name: str
    package: str
    """Debian's."""
    file: str = ""
    """What is started, if it has another name."""
    variables: tuple[tuple[str, str], ...] = ()
    """Where it finds its own files below the unpacked package."""
    device: str = ""
    """Of the kernel's, in /proc/misc, without which it is of no use."""


ETCD = Program("etcd", "etcd-server")
PROGRAMS = (
    ETCD,
    Program("ip", "iproute2"),
    Program("strace", "strace"),
    Program("systemd-analyze", "systemd", variables=(("SYSTEMD_UNIT_PATH", "lib/systemd/system"),)),
    # /usr/bin/valgrind is a script that sets variables for debug libraries, which we do not unpack.
    Program("valgrind", "valgrind", "valgrind.bin", (("VALGRIND_LIB", "usr/libexec/valgrind"),)),
    Program("dmsetup", "dmsetup", device="device-mapper"),
)


class CannotBeHad(Exception):
    """Why, as the end of a sentence."""


class Patience:
    """An amount of time that several commands share."""

    def __init__(self, seconds: float = ALL_S, command_s: float = COMMAND_S) -> None:
        self._until = time.monotonic() + seconds
        self._command_s = command_s
        self.lost = ""
        """Why no more is tried: what does not answer once need not be asked again."""

    def run(self, command: list[str], folder: Path, variables: Mapping[str, str] = os.environ) -> None:
        """Raises CannotBeHad if it fails, cannot be started, or takes too long."""
        seconds = min(self._command_s, self._until - time.monotonic())
        if self.lost or seconds <= 0:
            raise CannotBeHad(self.lost or "what was tried before took all the time that there was")
        with tempfile.TemporaryFile("w+") as said:  # a pipe would stay open as long as any child of a child
            try:
                process = subprocess.Popen(
                    command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=said, start_new_session=True,
                )  # fmt: skip
            except OSError as problem:
                raise CannotBeHad(f"{command[0]}: {problem.strerror}") from problem
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.lost = f"{Path(command[0]).name} did not end within {seconds:.0f} s"
                raise CannotBeHad(self.lost) from None
            finally:
                _end(process)
            said.seek(0)
            lines = said.read().strip().splitlines()
        if status != 0:
            raise CannotBeHad(_reason(lines) or f"{command[0]} ended with status {status}")


def _reason(lines: list[str]) -> str:
    """The first error of apt's, without the address that it is about, or else the last line."""
    errors = [line.removeprefix("E: ") for line in lines if line.startswith("E: ")]
    return re.sub(r"^Failed to fetch \S+\s+", "", [*errors, *lines[-1:], ""][0]).strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and all that it started; politely first, so that it removes what it has begun."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


# ------------------------------------------------------------------ Debian's packages
def unpacked(root: Path, program: Program, patience: Patience) -> Path:
    """What starts it, below build/needs; raises CannotBeHad."""
    folder = _place(root) / program.package
    with _locked(root):
        if not folder.exists():
            if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
                raise CannotBeHad("there is no apt-get here")
            new = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(new, ignore_errors=True)  # of one that was killed
            try:
                _unpack(program.package, new, patience)
                _write_start(program, new)
                new.rename(folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    return folder / "bin" / program.name


def _unpack(package: str, into: Path, patience: Patience) -> None:
    """With those of the packages it depends on that this machine does not have."""
    for folder in ("cache/archives/partial", "lists/partial"):
        (into / folder).mkdir(parents=True)
    (into / "cache" / "nothing").touch()
    ours = {"Dir::Cache": f"{into}/cache", "APT::Sandbox::User": "root", "Debug::NoLocking": "1"}
    lists = ours | {"Dir::State::lists": f"{into}/lists"}

    def download(options: Mapping[str, str]) -> None:
        install = ["install", "--download-only", "--yes", "--no-install-recommends", package]
        patience.run(_apt_get(options, *install), into)
        if not any((into / "cache" / "archives").glob(f"{package}_*.deb")):
            raise CannotBeHad(f"apt-get takes {package} for installed")

    try:
        download(ours)
    except CannotBeHad:  # the machine's lists may be missing or old, and what it has installed may not fit
        try:
            patience.run(_apt_get(lists | {"APT::Update::Error-Mode": "any"}, "update"), into)
        except CannotBeHad as problem:  # of one source of several, perhaps
            if not any((into / "lists").glob("*Packages*")):
                patience.lost = str(problem)
        download(lists | {"Dir::State::status": f"{into}/cache/nothing"})
    for archive in sorted((into / "cache" / "archives").glob("*.deb")):
        patience.run(["dpkg-deb", "--extract", str(archive), str(into / "root")], into)
    for name in ("cache", "lists"):
        shutil.rmtree(into / name)


def _apt_get(options: Mapping[str, str], *arguments: str) -> list[str]:
    given = [f"{name}={value}" for name, value in (APT_PATIENCE | dict(options)).items()]
    return ["apt-get", "-qq", *(word for option in given for word in ("-o", option)), *arguments]


def _write_start(program: Program, folder: Path) -> None:
    """A script that starts it with the libraries beside it, of which whatever it starts knows nothing."""
    top = folder / "root"
    name = program.file or program.name
    files = [place for directory in BINARIES if (place := top / directory / name).exists()]
    # A loader goes with its libc.  Links to one in a package are absolute: they lead to the machine's own.
    unpacked = [place for pattern in LOADERS for place in sorted(top.glob(pattern)) if not place.is_symlink()]
    loaders = unpacked or [place for pattern in LOADERS for place in sorted(Path("/").glob(pattern))]
    if not files or not loaders:
        raise CannotBeHad(f"{program.package} has no {name}, or this machine no loader for it")

    def below(path: Path) -> str:
        inside = path.is_relative_to(top)
        return f'"$here"/{shlex.quote(str(path.relative_to(top)))}' if inside else shlex.quote(str(path))

    libraries = [below(place) for pattern in LIBRARIES for place in sorted(top.glob(pattern))]
    lines = [
        "#!/bin/sh",
        f"# {program.name} of Debian's {program.package}, with the libraries beside it.",
        "here=${0%/*}/../root",
        *(f"export {name}={below(top / place)}" for name, place in program.variables),
        f'exec {below(loaders[0])} --library-path {":".join(libraries) or "/"} {below(files[0])} "$@"',
    ]
    start = folder / "bin" / program.name
    start.parent.mkdir()
    start.write_text("\n".join([*lines, ""]))
    start.chmod(0o755)


def _place(root: Path) -> Path:
    """Where all that is unpacked goes: beside what an older list made, not into it."""
    version = hashlib.sha256(repr(PROGRAMS).encode() + (root / SCRIPT).read_bytes())
    return root / "build" / "needs" / version.hexdigest()[:12]


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Two that want the same thing get it one after the other: the second one finds it there."""
    folder = _place(root)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------ CRIU
def criu_of(root: Path) -> Path:
    return root / "build" / "criu" / "bin" / "criu"


def install_criu(root: Path, patience: Patience) -> None:
    """By deploy/install-criu, as operators do; raises CannotBeHad."""
    prefix = criu_of(root).parent.parent
    with _locked(root):
        for begun in prefix.parent.glob(f"{prefix.name}.new-*"):  # by one that was killed
            shutil.rmtree(begun, ignore_errors=True)
        settings = _place(root) / "apt.conf"
        settings.write_text("".join(f'{name} "{value}";\n' for name, value in APT_PATIENCE.items()))
        try:
            patience.run(
                [str(root / SCRIPT), "--prefix", str(prefix)],
                root,
                os.environ | {"APT_CONFIG": str(settings)},
            )
        except CannotBeHad as problem:
            raise CannotBeHad(str(problem).removeprefix("install-criu: ")) from problem


# ------------------------------------------------------------------ all of it
def environment(root: Path = ROOT) -> dict[str, str]:
    """Variables with which tests find it.  The machine's own programs come first, and a CRIU that is set."""
    found = {}
    if CRIU not in os.environ and os.access(criu_of(root), os.X_OK):
        found[CRIU] = str(criu_of(root))
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    ours = sorted(str(folder) for folder in _place(root).glob("*/bin"))
    return found | {"PATH": os.pathsep.join([*path, *(place for place in ours if place not in path)])}


def missing(root: Path) -> list[Program]:
    """Programs that tests would not find, and that would be of use here."""
    path = environment(root)["PATH"]
    devices = Path("/proc/misc").read_text().split()
    return [
        program
        for program in PROGRAMS
        if shutil.which(program.name, path=path) is None and (not program.device or program.device in devices)
    ]


def provide(root: Path, patience: Patience) -> dict[str, list[str]]:
    """What cannot be had, by the reason."""
    problems: dict[str, list[str]] = {}
    for program in missing(root):
        with _reasons(problems, program.name):
            unpacked(root, program, patience)
    with _reasons(problems, "CRIU"):
        install_criu(root, patience)
    return problems


@contextlib.contextmanager
def _reasons(problems: dict[str, list[str]], name: str) -> Iterator[None]:
    try:
        yield
    except (CannotBeHad, OSError) as problem:  # of a build/ that is full or may not be written
        problems.setdefault(str(problem), []).append(name)


def main(root: Path = ROOT, patience: Patience | None = None) -> int:
    stamp = _place(root) / "done"
    if stamp.exists() and criu_of(root).exists() and not missing(root):
        return 0
    print("test-needs: CRIU and programs of Debian's packages, below build/", flush=True)
    problems = provide(root, patience or Patience())
    for reason, names in problems.items():
        print(
            f"test-needs: {', '.join(names)} cannot be had, and tests that want it are skipped: {reason}",
            file=sys.stderr,
        )
    if not problems:
        stamp.touch()
        for other in stamp.parent.parent.iterdir():  # of an older list
            if other.is_dir() and other != stamp.parent:
                shutil.rmtree(other, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
