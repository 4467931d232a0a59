"""The fuzz targets, and how each is compiled with libFuzzer; tests/csrc compiles them to replay a corpus."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
SANITIZERS = "fuzzer,address,undefined"

# What each target reads with, besides itself. None of it includes PyTorch.
TARGETS: dict[str, tuple[str, ...]] = {
    "record_reader": (
        "replay/csrc/log/log_map.cpp",
        "replay/csrc/log/templates.cpp",
        "replay/csrc/rewind/manifest.cpp",
        "replay/csrc/rewind/marks.cpp",
        "replay/csrc/tools/buffer_uses.cpp",
        "replay/csrc/tools/log_view.cpp",
        "replay/csrc/tools/log_walk.cpp",
    ),
    "manifest": (
        "proxy_server/csrc/snapshots/shadow_area.cpp",
        "replay/csrc/log/log_map.cpp",
        "replay/csrc/log/templates.cpp",
        "replay/csrc/rewind/manifest.cpp",
        "replay/csrc/rewind/marks.cpp",
        "replay/csrc/tools/log_view.cpp",
    ),
}


def corpus(target: str) -> Path:
    """The committed inputs of a target."""
    return FOLDER / "corpus" / target


def build(into: Path, compiler: str) -> dict[str, Path]:
    """Compiles all targets, each file once; returns the programs. Raises if the compiler refuses."""
    into.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++20", "-g1", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}"]
    flags += [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]

    def run(*words: str) -> None:
        done = subprocess.run([compiler, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler} failed:\n{done.stderr}")

    def object_of(source: str) -> str:
        return str(into / (source.replace("/", "-") + ".o"))

    sources = {s for target, needed in TARGETS.items() for s in (f"fuzz/{target}.cpp", *needed)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda s: run(*flags, "-c", str(ROOT / s), "-o", object_of(s)), sorted(sources)))
    programs = {}
    for target, needed in TARGETS.items():
        programs[target] = into / target
        parts = [object_of(s) for s in (f"fuzz/{target}.cpp", *needed)]
        run(f"-fsanitize={SANITIZERS}", *parts, "-pthread", "-o", str(programs[target]))
    return programs


def fuzzing_compiler() -> str | None:
    """A clang that has libFuzzer, or nothing."""
    probe = '#include <sanitizer/asan_interface.h>\nextern "C" int LLVMFuzzerTestOneInput() { return 0; }'
    for name in ("clang++", *(f"clang++-{version}" for version in range(22, 13, -1))):
        if path := shutil.which(name):
            words = [path, f"-fsanitize={SANITIZERS}", "-x", "c++", "-", "-o", "/dev/null"]
            if (
                subprocess.run(words, input=probe, text=True, capture_output=True, check=False).returncode
                == 0
            ):
                return path
    return None
