"""torch.compile and the profiler."""

from __future__ import annotations

import warnings

import torch
from script_scenario import Run, scenario, small_model, step
from torch.profiler import ProfilerActivity, profile, record_function, schedule

GROUP = "extending"


@scenario(GROUP)
def compiled_by_backends_that_need_no_compiler(run: Run) -> None:
    for backend in ("eager", "aot_eager"):
        model = small_model(run)
        compiled = torch.compile(model, backend=backend) if run.on_cuda else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for turn in range(3):
            step(run, compiled(run.data(6, 8, seed=turn)).square().mean(), optimizer)
        run.keep_model(model)


@scenario(GROUP)
def compiled_by_default_falls_back_to_eager_with_one_warning(run: Run) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for mode in (None, "reduce-overhead"):
            model = small_model(run)
            compiled = torch.compile(model, mode=mode) if run.on_cuda else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for turn in range(3):
                step(run, compiled(run.data(6 + turn, 8, seed=turn)).square().mean(), optimizer)
            run.keep_model(model)
    ours = [str(w.message) for w in caught if str(w.message).startswith("torch.compile:")]
    if run.on_cuda and (len(ours) != 1 or "Triton" not in ours[0]):
        raise AssertionError(f"warnings: {ours}")


@scenario(GROUP)
def profiled_training(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if run.on_cuda else [])
    traces: list[int] = []
    with profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=lambda p: traces.append(len(p.events())),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for turn in range(4):
            with record_function("a step"):
                step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)
            profiler.step()
    table = profiler.key_averages().table(row_limit=50)
    profiler.export_chrome_trace(str(run.folder / "trace.json"))
    if "a step" not in table or "aten::addmm" not in table or not traces:
        raise AssertionError(table)
    with torch.autograd.profiler.profile(use_device="cuda" if run.on_cuda else None) as old:
        step(run, model(run.data(6, 8)).square().mean(), optimizer)
    run.keep("old profiler", "aten::addmm" in old.key_averages().table())
    with torch.autograd.profiler.emit_nvtx(enabled=False):
        run.keep_model(model)
