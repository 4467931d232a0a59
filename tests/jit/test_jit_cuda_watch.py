"""The library for LD_PRELOAD, on a STAND-IN for CUDA's runtime and NCCL (tests/csrc/stand_in_cuda): what it
sees of NCCL's streams, and that a save does not wait for one that hangs (paper 001 §3.1-3.2).

What is marked `needs_a_gpu` is the real thing; `make test-gpu` runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from compiled_programs import ROOT, program
from training_run import gpus

from understudy.jit import boundaries, check, cuda_watch, watchdog
from understudy.jit.at_work import AtWork
from understudy.jit.generators import Generators
from understudy.jit.identity import JitError

pytestmark = pytest.mark.drawn(5)

needs_a_gpu = pytest.mark.skipif(gpus() == 0, reason="PyTorch finds no GPU here")
CSRC = ROOT / "tests" / "csrc" / "cuda_watch"
CASES = [
    case
    for source in ("cuda_watch_cases.cpp", "cuda_watch_saving_cases.cpp")
    for case in re.findall(r"\bCASE\((\w+)\)", (CSRC / source).read_text())
]


def preloaded(*more: Path) -> dict[str, str]:
    """Variables of a process with the library in front of all others."""
    return {**os.environ, "LD_PRELOAD": ":".join(map(str, [cuda_watch.preload(), *more]))}


def run(
    command: Sequence[str | Path], variables: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize("case", CASES)
def test_library_on_the_stand_in(case: str) -> None:
    done = run([program("cuda_watch_cases"), case], preloaded())
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"{case}: ok"]), done.stderr


def test_eight_threads_race_for_nothing_under_thread_sanitizer() -> None:
    done = run([program("cuda_watch_races"), "eight_threads_at_once"], timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]


def test_without_the_library_the_same_save_waits_for_the_collective_that_hangs() -> None:
    command: list[str | Path] = [
        program("cuda_watch_cases"),
        "a_save_copies_although_the_default_stream_hangs",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "copying\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "command",
    [
        ["ls", "/proc/self/task"],
        [sys.executable, "-P", "-c", "import os; print(os.listdir('/proc/self/task'))"],
    ],
    ids=["ls", "python"],
)
def test_in_a_program_without_cuda_it_does_nothing(command: list[str]) -> None:
    done = run(command, preloaded())
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(r"\d+", done.stdout)) == 1, "one thread"


def test_it_needs_libc_alone_and_shows_nothing_but_what_it_stands_in_front_of() -> None:
    if (nm := shutil.which("nm")) is None or (readelf := shutil.which("readelf")) is None:
        pytest.skip("nm and readelf, which come with compilers, are not here")
    shown = run([nm, "-D", "--defined-only", cuda_watch.preload()]).stdout
    names = [line.split()[-1] for line in shown.splitlines()]
    assert len(names) > 70
    assert [name for name in names if not re.match("cuda|nccl|understudy_cuda_watch_", name)] == []
    needed = re.findall(r"NEEDED.*\[(.*)\]", run([readelf, "-d", cuda_watch.preload()]).stdout)
    assert {re.split(r"[.-]", name)[0] for name in needed} <= {
        "libc",
        "libm",
        "libpthread",
        "ld",
        "librt",
        "libdl",
    }


def test_its_types_are_those_of_cudas_headers_and_it_passes_the_real_runtimes_answers_on(
    tmp_path: Path,
) -> None:
    if (nvcc := shutil.which("nvcc")) is None:
        pytest.skip("CUDA's headers and runtime are not here: there is no nvcc")
    built = tmp_path / "check"
    flags = ["-std=c++20", "-cudart", "shared", "-I", ROOT, "-Xcompiler", "-Wall,-Wextra,-Werror"]
    done = run([nvcc, *map(str, flags), CSRC / "cuda_abi_check.cpp", "-o", built], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    folders = Path(os.path.realpath(nvcc)).parent.parent
    path = ":".join(str(folders / name) for name in ("lib", "lib64"))
    native = run([built], {**os.environ, "LD_LIBRARY_PATH": path})
    assert native.returncode == 0 and len(native.stdout.splitlines()) == 11, native.stderr
    assert run([built], {**preloaded(), "LD_LIBRARY_PATH": path}).stdout == native.stdout


def test_the_command_line_says_what_to_preload(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["preload"]) == 0
    path = Path(capsys.readouterr().out.removesuffix("\n"))
    assert path == cuda_watch.preload() and path.is_file()


def test_the_command_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_watch, "__file__", str(tmp_path / "cuda_watch.py"))
    assert check.main(["preload"]) == 2
    assert "libunderstudy_cuda_watch.so is not installed" in capsys.readouterr().err


class Nccl:
    """Streams of a job whose collectives go by NCCL, or not."""

    def __init__(self, up: bool) -> None:
        self.up = up

    def current(self) -> list[tuple[int, int]]:
        raise AssertionError("no device is looked at without the library")

    def use(self, device: int, stream: int) -> contextlib.AbstractContextManager[None]:
        raise AssertionError("no device is looked at without the library")

    def nccl_is_up(self) -> bool:
        return self.up


@pytest.mark.parametrize("up", [False, True])
def test_where_it_is_not_loaded_nothing_happens_and_only_a_job_on_nccl_is_told(up: bool) -> None:
    said: list[str] = []
    watch = cuda_watch.CudaWatch(said.append, Nccl(up))
    watch.start()
    watch.settle()
    watch.boundary()
    with watch.saving(1.0):
        assert watch.counts() == ()
    watch.remark(100)
    assert (watch.is_loaded, watch.seen()) == (False, cuda_watch.Seen())
    assert len(said) == up and all("python -m understudy.jit preload" in one for one in said)


def test_without_cuda_in_use_no_device_is_asked() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU")
    streams = cuda_watch.TorchStreams()
    assert (streams.current(), streams.nccl_is_up()) == ((), False)


def test_devices_in_use_are_told_of_with_their_streams_and_that_of_the_thread_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        def __init__(self, device: int) -> None:
            self.cuda_stream = 100 + device

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda n: n in (0, 1, 3), raising=False)
    assert cuda_watch.TorchStreams().current() == [(0, 100), (3, 103), (1, 101)]


IN_PROCESS = """
import contextlib, ctypes, sys, threading
from understudy.jit.cuda_watch import CudaWatch
from understudy.jit.identity import JitError

framework = ctypes.CDLL(sys.argv[1])
framework.framework_size.restype = ctypes.c_size_t
framework.framework_open()

class Streams:
    up = True
    def current(self): return [(0, 0)]
    def use(self, device, stream): return contextlib.nullcontext()
    def nccl_is_up(self): return self.up

def until(condition):
    for _ in range(3000):
        if condition(): return
        threading.Event().wait(0.01)
    raise AssertionError("did not come about")

said = []
watch = CudaWatch(said.append, Streams())
watch.start()
assert watch.is_loaded and said == []
watch.remark(2)
assert said == []
watch.remark(3); watch.remark(4)
assert len(said) == 1 and "no call of NCCL was seen" in said[0], said

framework.framework_reduce_gradients()
until(lambda: watch.counts() == (("cuda:0 stream 0", 1, 1),))
framework.framework_update_parameters(7)
watch.boundary()
framework.framework_lose_peer(True)
framework.framework_reduce_gradients()
assert watch.counts() == (("cuda:0 stream 0", 2, 1),)
assert watch.seen().streams[0].waited_for

copied = (ctypes.c_ubyte * framework.framework_size())()
def save():
    with watch.saving(20.0):
        assert framework.framework_copy_out(copied) == 0
saver = threading.Thread(target=save)
saver.start(); saver.join(60)
assert set(copied) == {7}
assert watch.seen().copies_of_saves == 1

watch.boundary()  # behind the collective that hangs
try:
    with watch.saving(0.05): raise AssertionError("there is nothing that could be saved")
except JitError as error:
    assert "has not come to the end of the last step" in str(error), error
settled = threading.Thread(target=watch.settle)
settled.start(); settled.join(0.2)
assert settled.is_alive()
framework.framework_lose_peer(False)
settled.join(60)
until(lambda: watch.counts() == (("cuda:0 stream 0", 2, 2),))
save()
watch.remark(9)
assert len(said) == 1
print("ok")
"""


@pytest.fixture
def framework() -> Path:
    return program("stand_in_cuda/libframework.so")


def test_python_reads_the_counts_and_saves_past_a_collective_that_hangs(framework: Path) -> None:
    done = run([sys.executable, "-P", "-c", IN_PROCESS, framework], preloaded())
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_rank_on_nccl_whose_peer_is_lost_saves_the_last_step_and_ends(framework: Path, folder: Path) -> None:
    script = ROOT / "tests" / "workloads" / "jit_on_cuda.py"
    done = run([sys.executable, "-P", script, framework, folder / "ckpt", "5"], preloaded(), timeout=120)
    assert done.returncode == 75, done.stderr
    assert "step 5 saved" in done.stderr and "a collective has not moved" in done.stderr
    found = check.examine(folder / "ckpt")
    assert found.judgement.choice is not None and found.judgement.choice.step == 5
    device_synchronizations, *copied = found.saves[0].path.read_bytes()
    assert (device_synchronizations, set(copied)) == (0, {5})


class FakeWatch(cuda_watch.CudaWatch):
    """Says how two streams stand, and notes what is asked for."""

    def __init__(self) -> None:
        super().__init__(print)
        self.asked: list[str] = []

    def counts(self) -> tuple[cuda_watch.Count, ...]:
        return (("cuda:0 stream 0", 9, 8),)

    def settle(self) -> None:
        self.asked.append("settle")

    def boundary(self) -> None:
        self.asked.append("boundary")


def test_watchdog_counts_both_gloos_works_and_those_of_nccls_streams(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(watchdog, "counts", lambda: (("0", 5, 4),))
    monkeypatch.setattr(watchdog, "outstanding", lambda: False)
    at_work = AtWork(folder / "at-work", 0, print)
    dog = watchdog.Watchdog(1.0, lambda: 0, lambda: 0, lambda *_: None, at_work, print, FakeWatch())
    assert dog._works(inside=False) == (("0", 5, 4), ("cuda:0 stream 0", 9, 8))
    assert dog._works(inside=False) == (("0", 5, 5), ("cuda:0 stream 0", 9, 8)), "those of NCCL are exact"


def test_step_settles_in_front_of_any_change_and_marks_its_end_behind_all() -> None:
    class Optimizer:
        pass

    watch, optimizer = FakeWatch(), Optimizer()
    boundary = boundaries.Boundary(
        lambda: watch.asked.append(f"arrival {boundary.zone.name}"),
        lambda step, _: watch.asked.append(f"kept {step}"),
        print,
        devices=watch,
    )
    boundary.zone = boundaries.Zone.SETTLED
    try:
        boundary._before_optimizer(optimizer)
        boundary._behind_optimizer(optimizer)
        boundary.declare()
    finally:
        boundary.remove()
    assert watch.asked == [
        "settle", "arrival SETTLED", "boundary", "kept 1", "settle", "boundary", "kept 1", "arrival SETTLED",
    ]  # fmt: skip


class FakeDevices:
    """`torch.cuda` with generators of two devices, whose states are 16 bytes, as PyTorch's are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = [bytes(range(16)), bytes(range(16, 32))]
        self.in_use = True
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.in_use)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        monkeypatch.setattr(
            torch.cuda, "get_rng_state_all", lambda: [self._tensor(one) for one in self.states]
        )
        monkeypatch.setattr(torch.cuda, "set_rng_state", self._set)

    @staticmethod
    def _tensor(state: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def _set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state.numpy().tobytes()


def test_generators_of_devices_are_kept_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = FakeDevices(monkeypatch)
    kept = Generators.now()
    first = list(devices.states)
    devices.states = [bytes(16), bytes(16)]
    assert Generators.now() != kept
    Generators.of(kept.packed).put_back()
    assert devices.states == first and Generators.now() == kept


def test_generators_of_devices_that_are_no_more_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = FakeDevices(monkeypatch)
    kept = Generators.now()
    devices.states = [bytes(16)]
    kept.put_back()
    assert devices.states == [bytes(range(16))]
    devices.in_use = False
    assert len(Generators.now().packed) == len(kept.packed) - 32
    with pytest.raises(ValueError, match="do not fit"):
        Generators.of(kept.packed + b"x")


ON_A_GPU = """
import sys, threading
import torch
import torch.distributed as dist
from understudy.jit.cuda_watch import CudaWatch

said = []
dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}/rendezvous")
watch = CudaWatch(said.append)
watch.start()
state = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
expected = state.cpu()
for _ in range(5):
    dist.all_reduce(state)
torch.cuda.synchronize()
for _ in range(500):
    if all(begun == ended for _, begun, ended in watch.counts()): break
    threading.Event().wait(0.01)
assert watch.counts() and all(begun == ended > 0 for _, begun, ended in watch.counts()), watch.seen()
watch.boundary()
found = []
def save():
    with watch.saving(20.0):
        found.extend([state.cpu(), state.view(1024, 1024).t().cpu(), (state * 2).cpu()])
torch.cuda._sleep(20_000_000_000)  # cycles: the default stream hangs for some ten seconds
behind = torch.cuda.Event()
behind.record()
saver = threading.Thread(target=save)
saver.start(); saver.join()
assert not behind.query(), "the default stream did not hang for long enough"
assert torch.equal(found[0], expected)
assert torch.equal(found[1], expected.view(1024, 1024).t())
assert torch.equal(found[2], expected * 2)
watch.remark(10)
assert said == [] and watch.seen().query_error == 0, (said, watch.seen())
dist.destroy_process_group()
print("ok")
"""


@needs_a_gpu
def test_on_a_gpu_counts_of_nccl_move_and_a_save_does_not_wait_for_the_default_stream(tmp_path: Path) -> None:
    done = run([sys.executable, "-P", "-c", ON_A_GPU, tmp_path], preloaded(), timeout=200)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@needs_a_gpu
def test_on_a_gpu_the_generators_of_devices_come_back() -> None:
    torch.ones(1, device="cuda")
    kept = Generators.now()
    first = torch.rand(8, device="cuda")
    kept.put_back()
    assert torch.equal(torch.rand(8, device="cuda"), first)


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        understudy_cuda_watch_version = staticmethod(lambda: cuda_watch._VERSION + 1)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Other)
    assert not cuda_watch.CudaWatch(print).is_loaded


@pytest.mark.parametrize(("answer", "sentence"), [(-1, "could not be marked"), (700, "CUDA's error 700")])
def test_a_device_that_cannot_tell_where_it_is_is_not_saved_from(
    monkeypatch: pytest.MonkeyPatch, answer: int, sentence: str
) -> None:
    class Library:
        understudy_cuda_watch_begin_save = understudy_cuda_watch_end_save = staticmethod(lambda: None)
        understudy_cuda_watch_save_stream = staticmethod(lambda device: 1)
        understudy_cuda_watch_boundary = staticmethod(lambda device, stream: 1)
        understudy_cuda_watch_boundary_reached = staticmethod(lambda device: answer)

    class OneDevice(Nccl):
        def current(self) -> list[tuple[int, int]]:
            return [(0, 0)]

    monkeypatch.setattr(cuda_watch, "_loaded", lambda: Library)
    watch = cuda_watch.CudaWatch(print, OneDevice(True))
    watch.boundary()
    with pytest.raises(JitError, match=sentence), watch.saving(1.0):
        raise AssertionError("there is nothing to save")
