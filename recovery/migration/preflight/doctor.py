"""`recoveryctl doctor`: what this machine lacks, and the one step that gives it."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from understudy.recovery.machine import criu
from understudy.recovery.migration.process import namespaces

CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_CHECKPOINT_RESTORE": 40}
INSTALL = "run deploy/install-criu, which leaves the system's packages alone"
BEST_ENGINES = ("dax", "uring")
"""Of recovery/snapshots; both go past the page cache (O_DIRECT, or persistent memory)."""
LITTLE_SHARED_MEMORY = 1 << 30
LOG_BYTES = 4 << 30
"""What a rank's log may grow to, by default."""
OLDEST_KERNEL = (5, 9)
"""The first with CAP_CHECKPOINT_RESTORE and clone3(set_tid), by which CRIU gives pids back."""


class Verdict(StrEnum):
    """How one check came out."""

    GOOD = "good"
    NOTE = "note"
    """Something is slower or smaller than it could be."""
    BAD = "bad"
    """Something of ours does not work here."""


@dataclass(frozen=True)
class Check:
    """One row."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    """A sentence; empty if nothing is to be done."""


@dataclass(frozen=True)
class Machine:
    """What was found out about this one."""

    criu: criu.Criu | None
    criu_trouble: str
    """What `criu check` complains about; empty: nothing, or it was not run."""
    kernel: str
    capabilities: int
    """Effective ones, as bits."""
    ptrace_scope: int
    """0 to 3; kernels without yama: 0."""
    namespace_trouble: str
    """Why no pid and mount namespace can be made; empty: they can."""
    shared_memory_bytes: int
    shared_memory_free: int
    persist: str = ""
    persist_engine: str = ""
    persist_trouble: str = ""
    """Why nothing can be written there."""
    torch: str = ""
    built_for: str = ""


def examine(machine: Machine) -> list[Check]:
    """Every check, those of migration first."""
    checks = [
        _criu(machine), _kernel(machine), _kernel_for_criu(machine), _capabilities(machine), _ptrace(machine),
        _namespaces(machine), _shared_memory(machine),
    ]  # fmt: skip
    if machine.persist:
        checks.append(_persist(machine))
    return [*checks, _torch(machine)]


def _criu(machine: Machine) -> Check:
    found = machine.criu
    if found is None:
        return Check("CRIU", Verdict.BAD, "none", f"{INSTALL}, or name one in {criu.VARIABLE}")
    if not found.version:
        text = f"{found.path} ({found.source}) does not start: {found.trouble or 'it names no version'}"
        return Check("CRIU", Verdict.BAD, text, INSTALL)
    text = f"{found.version_text} at {found.path} ({found.source})"
    if not found.recent:
        least = ".".join(map(str, criu.LEAST))
        return Check("CRIU", Verdict.BAD, text, f"{least} or newer is needed: {INSTALL}")
    return Check("CRIU", Verdict.GOOD, text)


def _kernel(machine: Machine) -> Check:
    parts = machine.kernel.split("-")[0].split(".")[:2]
    version = tuple(int(part) for part in parts if part.isascii() and part.isdigit())
    if version < OLDEST_KERNEL:
        least = ".".join(map(str, OLDEST_KERNEL))
        return Check("kernel", Verdict.BAD, machine.kernel, f"workers can be moved from Linux {least} on")
    return Check("kernel", Verdict.GOOD, machine.kernel)


def _kernel_for_criu(machine: Machine) -> Check:
    name = "criu check"
    if machine.criu is None or not machine.criu.recent:
        return Check(name, Verdict.NOTE, "not run", "it needs a CRIU that is recent enough")
    if machine.criu_trouble:
        fix = "run it by hand as root: it names the kernel option or the capability that is missing"
        return Check(name, Verdict.BAD, machine.criu_trouble, fix)
    return Check(name, Verdict.GOOD, "looks good")


def _capabilities(machine: Machine) -> Check:
    missing = [name for name, bit in CAPABILITIES.items() if not machine.capabilities >> bit & 1]
    if missing:
        fix = "run proxyd and proxyrun as root, or in a container started with " + " ".join(
            f"--cap-add {name.removeprefix('CAP_')}" for name in missing
        )
        return Check("capabilities", Verdict.BAD, f"without {', '.join(missing)}", fix)
    return Check("capabilities", Verdict.GOOD, ", ".join(CAPABILITIES))


def _ptrace(machine: Machine) -> Check:
    found = f"kernel.yama.ptrace_scope = {machine.ptrace_scope}"
    if machine.ptrace_scope >= 3:
        fix = "no process may be dumped until the machine is started with kernel.yama.ptrace_scope=2 or less"
        return Check("ptrace", Verdict.BAD, found, fix)
    if machine.ptrace_scope and not machine.capabilities >> CAPABILITIES["CAP_SYS_PTRACE"] & 1:
        return Check("ptrace", Verdict.BAD, found, "sysctl kernel.yama.ptrace_scope=0")
    return Check("ptrace", Verdict.GOOD, found)


def _namespaces(machine: Machine) -> Check:
    if machine.namespace_trouble:
        fix = "a worker keeps its pid by a pid namespace: run proxyrun as root, or with --cap-add SYS_ADMIN"
        return Check("pid namespaces", Verdict.BAD, machine.namespace_trouble, fix)
    return Check("pid namespaces", Verdict.GOOD, "can be made")


def _shared_memory(machine: Machine) -> Check:
    total, free = machine.shared_memory_bytes, machine.shared_memory_free
    found = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    enlarge = "mount -o remount,size=16G /dev/shm (docker: --shm-size 16g)"
    if free < LITTLE_SHARED_MEMORY:
        return Check("/dev/shm", Verdict.BAD, found, f"a full one ends workers with SIGBUS: {enlarge}")
    if free < LOG_BYTES:
        fix = f"a rank's log may grow to {LOG_BYTES >> 30} GiB: {enlarge}, or give proxyd a smaller --log-cap"
        return Check("/dev/shm", Verdict.NOTE, found, fix)
    return Check("/dev/shm", Verdict.GOOD, found)


def _persist(machine: Machine) -> Check:
    name = f"--persist {machine.persist}"
    if machine.persist_trouble:
        fix = "name a directory that exists, has room and is writable"
        return Check(name, Verdict.BAD, machine.persist_trouble, fix)
    if machine.persist_engine not in BEST_ENGINES:
        fix = (
            "snapshots are written all the same, but slower than with io_uring and O_DIRECT: name a "
            "directory on a local disk, and set kernel.io_uring_disabled=0"
        )
        return Check(name, Verdict.NOTE, f"only {machine.persist_engine}", fix)
    return Check(name, Verdict.GOOD, machine.persist_engine)


def _torch(machine: Machine) -> Check:
    if machine.torch.split("+")[0] != machine.built_for.split("+")[0]:
        found = f"{machine.torch or 'none'}, built for {machine.built_for}"
        return Check("PyTorch", Verdict.BAD, found, f"pip install torch=={machine.built_for}, or make setup")
    return Check("PyTorch", Verdict.GOOD, machine.torch)


def look(named_criu: Path | None, persist: Path | None) -> Machine:
    """At this machine; takes a second."""
    found = criu.find(named_criu)
    shared = os.statvfs("/dev/shm")
    engine, trouble = _probe(persist) if persist is not None else ("", "")
    return Machine(
        criu=found,
        criu_trouble=criu.check(found) if found is not None and found.recent else "",
        kernel=platform.release(),
        capabilities=_effective_capabilities(Path("/proc/self/status").read_text(encoding="utf-8")),
        ptrace_scope=_ptrace_scope(Path("/proc/sys/kernel/yama/ptrace_scope")),
        namespace_trouble=namespaces.trouble_making(),
        shared_memory_bytes=shared.f_blocks * shared.f_frsize,
        shared_memory_free=shared.f_bavail * shared.f_frsize,
        persist=str(persist or ""),
        persist_engine=engine,
        persist_trouble=trouble,
        torch=_version_of("torch"),
        built_for=_built_for(),
    )


def _effective_capabilities(status: str) -> int:
    line = next((line for line in status.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return int(line.split()[1], 16)


def _ptrace_scope(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _probe(directory: Path) -> tuple[str, str]:
    """(engine that snapshots would be written with, or why none)."""
    from understudy.recovery.snapshots import _storage

    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix="understudy-doctor-") as folder:
            file = str(Path(folder) / "probe")
            _storage.create_file(file, 1 << 20)
            storage = _storage.Storage(file)
            try:
                return storage.engine, ""
            finally:
                storage.close()
    except OSError as problem:
        return "", problem.strerror or str(problem)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _built_for() -> str:
    from understudy.proxy_client.activation import version_built_for

    try:
        return version_built_for()
    except (ImportError, OSError) as problem:
        return f"nothing ({problem})"
