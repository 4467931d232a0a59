"""Whatever of PyTorch's state changes results: the worker has it, the device server gets it, and keeps it."""

from __future__ import annotations

import re
from pathlib import Path

import proxied
import pytest
import torch
from executor_harness import SETTING, Harness
from training_run import ROOT

from understudy.proxy_client.driver_settings import OF_THE_PROCESS
from understudy.proxy_server import _server

TABLE = (ROOT / "replay/csrc/settings/torch_settings.h").read_text()
OF_A_THREAD = {"set_num_threads", "set_flush_denormal"}
AUTOCAST = "which operators are called, and with what, is decided in the worker"
AUTOGRAD = "autograd is the worker's"
MODES = "modes and flags of Python's dispatch, which is the worker's"
SAYS = "only what is said, not what is computed"
NOT_FORWARDED = {
    r"set_autocast_.*": AUTOCAST,
    r"_set_(fwd_)?grad_(enabled|layout_enforcement_enabled)": AUTOGRAD,
    r"_set_(autograd_fallback_mode|multithreading_enabled|view_replay_enabled)": AUTOGRAD,
    r"set_anomaly_enabled": AUTOGRAD,
    r"_set_warn_on_accumulate_grad_stream_mismatch": SAYS,
    r"_set_backcompat_(broadcast|keepdim)_warn|_set_warnAlways": SAYS,
    r"_set_warn_deprecated_on_mutable_data_ptr": SAYS,
    r"_set_(dispatch_mode|meta_in_tls_dispatch_include|only_lift_cpu_tensors)": MODES,
    r"_set_skip_next_torch_function": MODES,
    r"_set_torch_function_state|_SetExcludeDispatchKeyGuard|_set_cached_tensors_enabled": MODES,
    r"_set_dtensor_allow_implicit_replication": MODES,
    r"_set_(conj|neg|tensor_metadata|throw_on_mutable_data_ptr)": "of one tensor",
    r"_set_(graph_exec_group|graph_executor_optimize|tracing_state|value_trace)": "of TorchScript",
    r"_set_should_use_format_with_string_table": "of TorchScript",
    r"_set_generator_metaclass|_set_thread_name|_set_worker_(pids|signal_handlers)": "of the process itself",
    r"_set_print_stack_traces_on_fatal_signal": SAYS,
    r"_set_default_mobile_cpu_allocator": "where memory of the CPU comes from",
    r"_set_override_stale_capture_stream": "CUDA graphs are refused",
    r"set_num_interop_threads": "how many operators of TorchScript run at once",
}
CONTEXT_NOT_FORWARDED = {
    "setReleaseWeightsWhenPrepacking": "memory of quantized weights",
    "setDisplayVmapFallbackWarnings": SAYS,
    "setWarnOnAccumulateGradStreamMismatch": SAYS,
    "setOverrideStaleCaptureStream": "CUDA graphs are refused",
    "setDefaultMobileCPUAllocator": "where memory of the CPU comes from",
    "setAllowTF32CuBLAS": "an older name for two of the rows",
}


def test_every_setter_of_torch_is_forwarded_or_there_is_a_reason_not_to() -> None:
    setters = {name for name in dir(torch._C) if re.match(r"_?[sS]et_?[a-zA-Z]", name)}
    assert len(setters) > 60
    reasoned = {name for name in setters if any(re.fullmatch(p, name) for p in NOT_FORWARDED)}
    assert setters - reasoned - OF_A_THREAD == set(OF_THE_PROCESS)
    assert reasoned.isdisjoint(OF_THE_PROCESS)
    dead = [p for p in NOT_FORWARDED if not any(re.fullmatch(p, name) for name in setters)]
    assert dead == []


def test_every_setter_of_at_context_has_a_row_or_there_is_a_reason_not_to() -> None:
    header = Path(torch.__file__).parent / "include/ATen/Context.h"
    setters = set(re.findall(r"\bvoid (_?set\w+)\(", header.read_text()))
    assert len(setters) > 35
    in_table = {name for name in setters if re.search(rf"\b{name}\b", TABLE)}
    assert setters - in_table == set(CONTEXT_NOT_FORWARDED)


@pytest.mark.drawn(2)
def test_the_device_server_hears_of_whatever_is_set_below_torch_backends(tmp_path: Path) -> None:
    script = proxied.WORKLOADS / "settings_of_backends.py"
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    result = ended.result()
    print(result)
    assert result["silent"] == []
    assert result["heard"] >= 18


def of_the_process() -> dict[int, tuple[int, int | None]]:
    """Largest and present value of the settings that are not a thread's, and that every CPU takes."""
    of_a_thread, not_of_every_cpu = {0, 3}, {7, 20}
    return {
        number: (most, value)
        for number, most, value in _server.settings()
        if number not in of_a_thread | not_of_every_cpu
    }


def test_every_setting_is_put_back_by_a_rewind_a_restore_and_the_next_session() -> None:
    """This process is the device server: what PyTorch says here is what kernels see."""
    with Harness() as h:  # which sets back what another test's last session has left
        h.synchronize()
        before = of_the_process()
    flags = {number: 1 - value for number, (most, value) in before.items() if most == 1 and value is not None}
    assert len(flags) >= 17
    try:
        with Harness() as h:
            h.commit()
            first = flags.copy()
            for number, value in first.items():
                h.writer.append(SETTING, number, [value])
            h.commit()
            h.synchronize()
            assert {number: of_the_process()[number][1] for number in flags} == flags
            for number, value in flags.items():
                h.writer.append(SETTING, number, [1 - value])
            h.run_all()
            assert of_the_process() == before
            h.executor.park()
            h.executor.rewind(2)
            h.executor.detach()
            h.executor = h.new_executor()
            h.executor.restore(2)
            h.executor.resume()
            h.run_all()  # they are set back once more
            h.synchronize()
            assert of_the_process() == before
            h.executor.park()
            h.executor.rewind(2)
            h.executor.resume()
            h.run_all()
            assert of_the_process() == before
    finally:
        with Harness() as h:
            h.synchronize()
            assert of_the_process() == before
