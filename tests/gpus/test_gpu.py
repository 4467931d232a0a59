"""Real GPUs: the `cuda` driver against native CUDA. Skipped, with a reason, where there is none."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import gpu
import proxied
import pytest
import training_run
from training_run import ROOT, TooFewGpus, Training, execute, gpus

GPUS = gpus()
needs_a_gpu = pytest.mark.skipif(GPUS == 0, reason="PyTorch finds no GPU here")
needs_two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, PyTorch finds {GPUS} here")
TINY = ["--batch", "4", "--tiny"]
EXACT = [*TINY, "--deterministic"]


@pytest.fixture
def cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_TEST_DRIVER", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def cpu_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_TEST_DRIVER", "cpu")


@needs_a_gpu
@pytest.mark.usefixtures("cuda_driver")
@pytest.mark.parametrize("model", gpu.MODELS)
def test_losses_equal_those_of_native_cuda_bit_for_bit(model: str, tmp_path: Path) -> None:
    training = Training("bench/workloads/large_models.py", 1, 12, [model, *EXACT])
    native = training.run(tmp_path / "native", proxied=False)
    assert training.run(tmp_path / "proxied", proxied=True).losses == native.losses


@needs_a_gpu
@pytest.mark.usefixtures("cuda_driver")
def test_a_server_killed_amid_what_natively_differs_each_time_changes_no_bit(tmp_path: Path) -> None:
    training = Training("digits_convnet.py", 1, 20)
    undisturbed = training.run(tmp_path / "undisturbed", proxied=True)
    killed = training.run(tmp_path / "killed", proxied=True, drills=("kill-server rank=0 step=9 call=50",))
    assert [recovery["recovered"] for recovery in killed.report["recoveries"]] == [True]
    assert (killed.losses, killed.report["replies_different"]) == (undisturbed.losses, 0)


@needs_two_gpus
@pytest.mark.usefixtures("cuda_driver")
def test_a_killed_server_changes_no_bit_of_two_ranks_losses(tmp_path: Path) -> None:
    training = Training("char_gpt.py", 2, 12, ["--dropout", "0"])
    native = training.run(tmp_path / "native", proxied=False)
    killed = training.run(tmp_path / "killed", proxied=True, drills=("kill-server rank=1 step=6 call=100",))
    assert killed.losses == native.losses
    assert [recovery["recovered"] for recovery in killed.report["recoveries"]] == [True]


@needs_a_gpu
@pytest.mark.usefixtures("cuda_driver")
def test_the_worker_has_no_memory_and_no_file_of_the_gpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "x = torch.ones(1024, device='cuda') * 2\n"
        "assert x.sum().item() == 2048\n"
        "open_files = [os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')]\n"
        "assert not any('/dev/nvidia' in name for name in open_files), open_files\n"
        "import subprocess\n"
        "query = ['nvidia-smi', '--query-compute-apps=pid', '--format=csv,noheader']\n"
        "users = subprocess.run(query, capture_output=True, text=True).stdout.split()\n"
        "assert str(os.getpid()) not in users, users\n"
        "print('clean')\n"
    )
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    assert ended.output.strip().endswith("clean"), ended.output[-3000:]


@needs_a_gpu
@pytest.mark.usefixtures("cuda_driver")
def test_running_out_of_memory_is_the_exception_that_pytorch_raises(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "try:\n"
        "    torch.empty(1 << 44, dtype=torch.uint8, device='cuda').sum().item()\n"
        "except torch.OutOfMemoryError as error:\n"
        "    print('refused:', error)\n"
    )
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    assert "refused: CUDA out of memory" in ended.output, ended.output[-3000:]


@needs_a_gpu
@pytest.mark.usefixtures("cuda_driver")
def test_operators_give_the_bytes_that_native_cuda_gives(tmp_path: Path) -> None:
    script = proxied.WORKLOADS / "operator_digests.py"
    found = []
    for name in ("native", "native again"):
        execute([*proxied.python(script), "--out", str(tmp_path / name)], 1800)
        found.append(json.loads((tmp_path / name).read_text()))
    ended = proxied.run(
        proxied.python(script, "--out", str(tmp_path / "proxied")), folder=tmp_path, timeout_s=1800
    )
    assert ended.status == 0, ended.output[-3000:]
    under_proxy = json.loads((tmp_path / "proxied").read_text())
    repeatable = {name: seen for name, seen in found[0].items() if found[1][name] == seen}
    assert {n: s for n, s in repeatable.items() if under_proxy[n] != s} == {}


@pytest.mark.drawn(4)
@pytest.mark.usefixtures("cpu_driver")
def test_operators_on_cpu_devices_give_the_bytes_of_the_cpu_in_the_same_comparison(tmp_path: Path) -> None:
    script = proxied.WORKLOADS / "operator_digests.py"
    few = ["--every", "40"]
    execute([*proxied.python(script, *few), "--device", "cpu", "--out", str(tmp_path / "native")], 200)
    ended = proxied.run(proxied.python(script, *few, "--out", str(tmp_path / "proxied")), folder=tmp_path)
    assert ended.status == 0, ended.output[-3000:]
    native = json.loads((tmp_path / "native").read_text())
    under_proxy = json.loads((tmp_path / "proxied").read_text())
    assert len(native) > 10
    assert {name for name, seen in under_proxy.items() if name in native and native[name] != seen} == set()


@pytest.mark.usefixtures("cpu_driver")
@pytest.mark.parametrize("model", ["gpt2", pytest.param("resnet50", marks=pytest.mark.long)])
def test_the_models_of_the_gpu_bench_train_on_cpu_devices_bit_for_bit(model: str, tmp_path: Path) -> None:
    training = Training("bench/workloads/large_models.py", 1, 4, [model, *TINY])
    native = training.run(tmp_path / "native", proxied=False)
    assert training.run(tmp_path / "proxied", proxied=True).losses == native.losses


@needs_a_gpu
@pytest.mark.usefixtures("cuda_driver")
def test_a_device_side_assertion_ends_the_script_with_its_own_text(tmp_path: Path) -> None:
    """No process survives one: device servers are started anew, and find it at the same record again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "x = torch.ones(1, device='cuda')[torch.tensor([10**9], device='cuda')]\n"
        "try:\n"
        "    x.sum().item()\n"
        "except RuntimeError as error:\n"
        "    print('raised:', error)\n"
    )
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    said = next(line for line in ended.output.splitlines() if line.startswith("raised: "))
    assert "died 3 times" in said and "CUDA error: device-side assert triggered" in said


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU: the bench would run")
def test_without_a_gpu_the_bench_says_so_in_one_sentence_and_succeeds() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "gpu.py")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "bench-gpu: skipped, PyTorch finds no GPU here\n")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (
            "CUDA error: an illegal memory access was encountered\nCompile with",
            "an illegal memory access was encountered",
        ),
        ("CUDA error: device-side assert triggered", "device-side assert triggered"),
        ("index_select: CUDA error: unspecified launch failure", "unspecified launch failure"),
        ("CUDA error: invalid argument", ""),
        ("CUDA out of memory. Tried to allocate 2 GiB", ""),
        ("an illegal memory access was encountered", ""),
    ],
)
def test_an_error_that_no_process_survives_is_told_from_one_of_a_call(message: str, named: str) -> None:
    from understudy.proxy_server import _server

    assert _server.sticky_error(message) == named


def test_each_of_these_errors_is_named_as_the_cuda_runtime_names_it() -> None:
    from understudy.proxy_server import _server

    libraries = sorted(Path("/usr/local").glob("cuda-13*/lib*/libcudart.so.13*"))
    if not libraries:
        pytest.skip("no runtime of CUDA 13 here")
    runtime = ctypes.CDLL(str(libraries[0]))
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    errors = _server.sticky_errors()
    assert len(errors) >= 19
    for code, name in errors:
        assert runtime.cudaGetErrorString(code).decode() == name
        assert _server.sticky_error(f"CUDA error: {name}\nCompile with") == name


def test_ranks_that_would_share_a_gpu_do_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDERSTUDY_TEST_DRIVER", "cuda")
    monkeypatch.setattr(training_run, "gpus", lambda: 1)
    training = Training("char_gpt.py", 2, 1)
    for way in (True, False):
        with pytest.raises(TooFewGpus, match="2 ranks need as many GPUs, PyTorch finds 1 here"):
            training.run(tmp_path / "never", proxied=way)
