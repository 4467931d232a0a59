"""What a lent GPU is to show, in parts that go together into one short call: `gpu_day.py OUT PART ...`.

Each part runs beside the others (but those that measure times, which run by themselves, last), writes
OUT/PART.json as it goes, so that a call that is cut loses nothing, and never fails the call: what went wrong
is part of what it writes.
One GPU is enough: ranks share it, and Gloo stages what they exchange (`ranks`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import ROOT
from training_run import Outcome, RunFailed, Training, driver, execute, installed

LARGE = "bench/workloads/large_models.py"
LONE = {
    "char_gpt, dropout 0.1": Training("char_gpt.py", 1, 30),
    "gpt2, tiny": Training(LARGE, 1, 12, ["gpt2", "--tiny", "--deterministic"]),
    "resnet50, tiny": Training(LARGE, 1, 12, ["resnet50", "--tiny", "--deterministic"]),
    "digits_convnet": Training("digits_convnet.py", 1, 20),
}
LARGE_ONES = {
    "gpt2 124M, batch 8": Training(LARGE, 1, 40, ["gpt2"]),
    "gpt2 124M, batch 8, TF32": Training(LARGE, 1, 40, ["gpt2", "--precision", "tf32"]),
    "gpt2 124M, batch 8, bfloat16": Training(LARGE, 1, 40, ["gpt2", "--precision", "bf16"]),
    "resnet50, batch 64": Training(LARGE, 1, 40, ["resnet50", "--batch", "64"]),
    "char_gpt, dropout 0.1": Training("char_gpt.py", 1, 120),
}
EXACT = {  # natively their losses are others each time
    "digits_convnet": Training("digits_convnet.py", 1, 20),
    "gpt2 124M, batch 8": Training(LARGE, 1, 14, ["gpt2"]),
}
TWICE = Training(LARGE, 2, 14, ["gpt2", "--precision", "bf16"])
FAULTS = (
    "kill-server rank=0 step=8 call=5", "kill-server rank=0 step=12 call=200",
    "sticky-error rank=0 step=9 call=60",
)  # fmt: skip
FAULTS_OF_TWO = (
    "kill-server rank=1 step=8 call=5", "kill-server rank=1 step=12 call=200",
    "sticky-error rank=0 step=9 call=60",
)  # fmt: skip
FAULTS_OF_NCCL = ("kill-server rank=0 step=8 call=12", "call-error rank=0 step=12 call=20")
TESTS = (
    "gpus/test_cuda_build", "device_server/test_executor", "device_server/test_executor_sparse",
    "device_server/test_executor_views", "gpus/test_gpu", "snapshots/test_restored_snapshots",
    "device_server/test_roll_forward_executor", "snapshots/test_snapshot_copies",
    "snapshots/test_snapshot_leases", "snapshots/test_snapshots", "client/test_worker",
)  # fmt: skip
WHOLE_DATABASE = "tests/gpus/test_gpu.py::test_operators_give_the_bytes_that_native_cuda_gives"
"""Three times; `operators` looks at a part of it, once it is clear that anything works."""
ERRORS = {
    "device-side assert": "torch.ones(1, device='cuda')[torch.tensor([10**9], device='cuda')].sum().item()",
    "out of memory": "torch.empty(1 << 44, dtype=torch.uint8, device='cuda').sum().item()",
}


class Part:
    """Notes of one part, on disk as soon as they are made."""

    def __init__(self, folder: Path, name: str, tests: list[str]) -> None:
        self._file = folder / f"{name}.json"
        self._name = name
        self.log = folder / f"{name}.log"
        self.tests = tests
        self._begin = time.monotonic()
        self.rows: list[dict[str, Any]] = []

    def note(self, **row: Any) -> None:
        self.rows.append({"at_s": round(time.monotonic() - self._begin, 1), **row})
        self._file.write_text(json.dumps(self.rows, indent=1, default=str))
        print(f"[{self._name}] {json.dumps(row, default=str)[:600]}", flush=True)

    def attempt(self, what: str, run: Callable[[], dict[str, Any]]) -> None:
        begin = time.monotonic()
        try:
            found = run()
        except Exception as problem:  # noqa: BLE001  # whatever it was: the other parts are worth as much
            found = {"failed": f"{type(problem).__name__}: {problem}"[-3500:]}
        self.note(what=what, seconds=round(time.monotonic() - begin, 2), **found)


def _python(*words: str, timeout_s: float = 200) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RunFailed((done.stdout + done.stderr)[-3000:])
    return done.stdout.strip()


def _noted(workload: str) -> dict[str, Any]:
    return dict(
        json.loads(_python(str(ROOT / "bench" / "workloads" / workload), timeout_s=250).splitlines()[-1])
    )


def facts(part: Part) -> None:
    """Versions, rates of copies and launches, and the time to a context."""
    part.note(what="versions", **json.loads(_python("-c",
        "import json, os, sys, torch; p = torch.cuda.get_device_properties(0);"
        "print(json.dumps({'torch': torch.__version__, 'python': sys.version.split()[0], 'gpu': p.name,"
        "'kernel': os.uname().release, 'nccl': torch.cuda.nccl.version(),"
        "'cudnn': torch.backends.cudnn.version()}))"
    )))  # fmt: skip
    part.attempt("rates", lambda: _noted("gpu_rates.py"))


def host_results(part: Part) -> None:
    """Which operators of PyTorch's database give results in host memory for tensors on the GPU."""
    part.attempt("operators", lambda: _noted("gpu_host_results.py"))


def operators(part: Part) -> None:
    """Every third operator of PyTorch's database: those bytes of native CUDA that are always the same."""
    script = str(ROOT / "tests" / "workloads" / "operator_digests.py")

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            found = []
            for what in ("native", "native again", "proxied"):
                words = [sys.executable, script, "--every", "3", "--out", f"{name}/{what}"]
                if what == "proxied":
                    words = [*installed("proxyrun"), "--devices", f"{driver()}:1", *words]
                execute(words, 150)
                found.append(json.loads(Path(name, what).read_text()))
        first, again, ours = found
        repeatable = {case: seen for case, seen in first.items() if again.get(case) == seen}
        different = {case: ours.get(case) for case, seen in repeatable.items() if ours.get(case) != seen}
        return {"cases": len(first), "repeatable": len(repeatable), "different": different}

    part.attempt("every third", run)


def tests(part: Part) -> None:
    """The executor's tests and those of `make test-gpu` that one GPU is enough for, on cuda:0."""
    files = [f"tests/{name}.py" for name in part.tests]

    def run() -> dict[str, Any]:
        # The command, not the module: that would find the checkout's folders instead of what is installed.
        words = [str(Path(sys.executable).with_name("pytest")), "-v", "-n", "6", "--dist", "loadfile",
                 "--timeout", "150", "--session-timeout", "190", "-p", "no:cacheprovider", "--tb", "short",
                 "--deselect", WHOLE_DATABASE, *files]  # fmt: skip
        with part.log.open("w") as output:
            done = subprocess.run(
                words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=260, check=False,
                env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            )  # fmt: skip
        return {"status": done.returncode, "ends": part.log.read_text()[-300:]}

    part.attempt("pytest", run)


def _compare(training: Training, folder: Path, name: str, natively: int = 2) -> dict[str, Any]:
    native, again = [training.run(folder / f"{name}-native-{turn}", proxied=False, timeout_s=250)
                     for turn in range(natively)] * (3 - natively)  # fmt: skip
    proxied = training.run(folder / f"{name}-proxied", proxied=True, timeout_s=250)

    def same(other: Outcome) -> int:
        return sum(a == b for a, b in zip(native.losses[0], other.losses[0], strict=True))

    return {
        "steps": training.steps, "same_bits": same(proxied), "natively": same(again),
        "native_s": native.step_seconds,
        "proxied_s": proxied.step_seconds, "ratio": proxied.step_seconds / native.step_seconds,
    }  # fmt: skip


def lone(part: Part) -> None:
    """Native and proxied: the losses' bits."""
    with tempfile.TemporaryDirectory() as name:
        for number, (what, training) in enumerate(LONE.items()):
            part.attempt(what, lambda t=training, n=number: _compare(t, Path(name), str(n)))  # type: ignore[misc]


def _faults(part: Part, training: Training, faults: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed: dict[str, Any] = {}

        def first() -> dict[str, Any]:
            ended = training.run(folder / "undisturbed", proxied=True, timeout_s=150)
            undisturbed["losses"] = ended.losses
            return {"step_s": ended.step_seconds}

        part.attempt("undisturbed", first)
        for number, fault in enumerate(faults):

            def strike(number: int = number, fault: str = fault) -> dict[str, Any]:
                ended = training.run(folder / str(number), proxied=True, drills=(fault,), timeout_s=150)
                same = ended.losses == undisturbed.get("losses")
                return {"same_bits": same, "recoveries": ended.report["recoveries"]}

            part.attempt(fault, strike)


def recovery(part: Part) -> None:
    """A lone rank: its server dies or fails amid a step, and is built up again by snapshot and log."""
    _faults(part, Training("char_gpt.py", 1, 20), FAULTS)


def exact(part: Part) -> None:
    """Programs whose losses natively are others each time: a recovery changes no bit all the same."""

    def strike(training: Training, folder: Path) -> dict[str, Any]:
        undisturbed = training.run(folder / "undisturbed", proxied=True)
        killed = training.run(folder / "killed", proxied=True, drills=("kill-server rank=0 step=9 call=50",))
        same = sum(a == b for a, b in zip(undisturbed.losses[0], killed.losses[0], strict=True))
        return {"same_bits": same, "steps": training.steps, "different": killed.report["replies_different"],
                "recoveries": killed.report["recoveries"]}  # fmt: skip

    def one(what: str, training: Training) -> None:
        with tempfile.TemporaryDirectory() as name:
            part.attempt(what, lambda: strike(training, Path(name)))

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, *zip(*EXACT.items(), strict=True)))


def ranks(part: Part) -> None:
    """Two ranks that share the GPU."""
    os.environ["UNDERSTUDY_TEST_SHARED_GPU"] = "1"
    _faults(part, Training("char_gpt.py", 2, 20), FAULTS_OF_TWO)


def nccl(part: Part) -> None:
    """Communicators of one rank: connect, collectives, a second group, its end, a server killed."""
    training = Training("bench/workloads/lone_nccl.py", 1, 20, launched=True)
    with tempfile.TemporaryDirectory() as name:
        part.attempt("native and proxied", lambda: _compare(training, Path(name), "nccl"))
    _faults(part, training, FAULTS_OF_NCCL)


def protected(part: Part) -> None:
    """Step times of two replicas that share the GPU, with all that protects them; they exchange nothing."""
    os.environ["UNDERSTUDY_TEST_SHARED_GPU"] = "1"
    with tempfile.TemporaryDirectory() as name:

        def run() -> dict[str, Any]:
            ended = TWICE.run(Path(name, "replicas"), proxied=True, timeout_s=150)
            return {"step_s": ended.step_seconds, "steps": ended.seconds[0]}

        part.attempt("gpt2 124M, batch 8, bfloat16, two replicas", run)


def errors(part: Part) -> None:
    """What the script sees of errors that are its own."""
    for what, line in ERRORS.items():

        def run(line: str = line) -> dict[str, Any]:
            answer = "except Exception as e:\n    print(type(e).__name__, str(e)[:300])\n"
            text = f"import torch\ntry:\n    {line}\n{answer}"
            words = [*installed("proxyrun"), "--devices", f"{driver()}:1", sys.executable, "-c", text]
            return {"output": execute(words, 100, expected=range(256))[-1500:]}

        part.attempt(what, run)


def speed(part: Part) -> None:
    """Step times, natively and proxied."""
    with tempfile.TemporaryDirectory() as name:
        for number, (what, training) in enumerate(LARGE_ONES.items()):
            part.attempt(what, lambda t=training, n=str(number): _compare(t, Path(name), n, 1))  # type: ignore[misc]


PARTS = {
    "facts": facts, "host_results": host_results, "operators": operators, "tests": tests, "lone": lone,
    "recovery": recovery, "exact": exact, "ranks": ranks, "nccl": nccl, "errors": errors, "speed": speed,
    "protected": protected,
}  # fmt: skip
ALONE = ("speed", "protected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the notes go")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="the files of the part `tests`")
    asked = parser.parse_args()
    os.environ.setdefault("UNDERSTUDY_TEST_DRIVER", "cuda")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # native deterministic products ask for it
    if len(asked.parts) == 1:
        return PARTS[asked.parts[0]](Part(asked.folder, asked.parts[0], asked.tests))
    program = [sys.executable, os.path.abspath(__file__), os.fspath(asked.folder)]
    files = ["--tests", *asked.tests]
    beside = [subprocess.Popen([*program, name, *files]) for name in asked.parts if name not in ALONE]
    for one in beside:
        one.wait()
    for name in ALONE:
        if name in asked.parts:
            subprocess.run([*program, name], check=False)


if __name__ == "__main__":
    main()
