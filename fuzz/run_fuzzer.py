"""Runs libFuzzer on every target for a while, from the committed corpus; `make fuzz`.

What it finds lies in build/fuzz/found, what it learnt in build/fuzz/corpus; with --merge the smallest set of
inputs that covers all of that becomes the committed corpus.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from fuzz_targets import ROOT, TARGETS, build, corpus, fuzzing_compiler

WORK = ROOT / "build" / "fuzz"
LIMITS = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=24576"]


def fuzz(program: Path, target: str, seconds: int) -> int:
    """Returns the fuzzer's status: 0 if it found nothing."""
    learnt, found = WORK / "corpus" / target, WORK / "found" / target
    learnt.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    command = [str(program), f"-max_total_time={seconds}", "-print_final_stats=1", *LIMITS]
    command += [f"-artifact_prefix={found}/", str(learnt), str(corpus(target))]
    return subprocess.run(command, check=False).returncode


def merge(program: Path, target: str) -> None:
    """Makes the smallest set of inputs that covers what is known the committed corpus."""
    smallest = WORK / "smallest" / target
    shutil.rmtree(smallest, ignore_errors=True)
    smallest.mkdir(parents=True)
    old = [str(corpus(target)), str(WORK / "corpus" / target)]
    subprocess.run([str(program), "-merge=1", *LIMITS, str(smallest), *old], check=True)
    for file in smallest.iterdir():
        kept = corpus(target) / file.name
        if not kept.exists():
            shutil.copyfile(file, kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--merge", action="store_true", help="add what was learnt to the corpus")
    options = parser.parse_args()
    compiler = fuzzing_compiler()
    if compiler is None:
        sys.stdout.write(
            "fuzz: skipped, no clang with libFuzzer here (Debian: clang and libclang-rt-*-dev)\n"
        )
        return 0
    programs = build(WORK / "programs", compiler)
    status = 0
    for target in options.target or TARGETS:
        status |= fuzz(programs[target], target, options.seconds)
        if options.merge:
            merge(programs[target], target)
    return status


if __name__ == "__main__":
    sys.exit(main())
