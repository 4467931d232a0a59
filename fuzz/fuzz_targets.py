"""The fuzz targets, and how each is compiled: with libFuzzer (clang), or to replay a corpus (any)."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
SANITIZERS = "address,undefined"

# What each target reads with, besides itself. None of it includes PyTorch.
TARGETS: dict[str, tuple[str, ...]] = {
    "record_reader": (
        "replay/csrc/log_map.cpp",
        "replay/csrc/log_view.cpp",
        "replay/csrc/manifest.cpp",
        "replay/csrc/templates.cpp",
    ),
    "manifest": (
        "replay/csrc/log_map.cpp",
        "replay/csrc/log_view.cpp",
        "replay/csrc/manifest.cpp",
        "replay/csrc/templates.cpp",
        "proxy_server/csrc/shadow_area.cpp",
    ),
}


def corpus(target: str) -> Path:
    """The committed inputs of a target."""
    return FOLDER / "corpus" / target


def build(
    into: Path, compiler: str, sanitizers: str = SANITIZERS, main: str | None = None
) -> dict[str, Path]:
    """Compiles all targets, each file once; returns the programs. Raises if a compiler refuses.

    ``main`` is a source file with main(), where the sanitizers bring none.
    """
    into.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++20", "-g1", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]

    def run(*words: str) -> None:
        done = subprocess.run([*compiler.split(), *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} failed:\n{done.stderr}")

    def object_of(source: str) -> str:
        return str(into / (source.replace("/", "-") + ".o"))

    extra = [main] if main else []
    sources = {s for target, needed in TARGETS.items() for s in (f"fuzz/{target}.cpp", *needed, *extra)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda s: run(*flags, "-c", str(ROOT / s), "-o", object_of(s)), sorted(sources)))
    programs = {}
    for target, needed in TARGETS.items():
        programs[target] = into / target
        parts = [object_of(s) for s in (f"fuzz/{target}.cpp", *needed, *extra)]
        run(f"-fsanitize={sanitizers}", *parts, "-pthread", "-o", str(programs[target]))
    return programs


def fuzzing_compiler() -> str | None:
    """A clang that has libFuzzer, or nothing."""
    probe = '#include <sanitizer/asan_interface.h>\nextern "C" int LLVMFuzzerTestOneInput() { return 0; }'
    for name in ("clang++", *(f"clang++-{version}" for version in range(22, 13, -1))):
        if path := shutil.which(name):
            words = [path, "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-", "-o", "/dev/null"]
            if (
                subprocess.run(words, input=probe, text=True, capture_output=True, check=False).returncode
                == 0
            ):
                return path
    return None
