"""What scripts ask torch.cuda, and streams and events. What the CPU cannot answer is checked by itself."""

from __future__ import annotations

import warnings

import torch
from script_scenario import Run, scenario, small_model, step

GROUP = "loading"
MEGABYTE = 1 << 20


def expect(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def train(run: Run, turns: int = 3) -> None:
    model = small_model(run, dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.seed(4)
    for turn in range(turns):
        step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)


@scenario(GROUP)
def streams_and_events(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not run.on_cuda:
        for turn in range(4):
            x = torch.full((6, 8), float(turn)) * 2
            step(run, model(x).square().mean(), optimizer)
        return run.keep_model(model)
    side, urgent = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    expect(side != urgent and side != torch.cuda.current_stream(), "two streams are one")
    expect(
        torch.cuda.default_stream() == torch.cuda.current_stream(), "the current stream is not the default"
    )
    expect(urgent.priority <= 0 and len(torch.cuda.Stream.priority_range()) == 2, "priorities")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(4):
        begin.record()
        with torch.cuda.stream(side):
            expect(torch.cuda.current_stream() == side, "the stream context does nothing")
            x = torch.full((6, 8), float(turn), device="cuda")
            ready = side.record_event()
        with torch.cuda.stream(urgent):
            urgent.wait_event(ready)
            x = x * 2
        torch.cuda.current_stream().wait_stream(urgent)
        x.record_stream(torch.cuda.current_stream())
        loss = model(x).square().mean()
        end.record()
        end.synchronize()
        expect(end.query() and side.query() and begin.elapsed_time(end) >= 0.0, "events")
        step(run, loss, optimizer)
    side.synchronize()
    torch.cuda.synchronize()
    event = torch.Event("cuda")
    event.record()
    event.synchronize()
    with torch.Stream("cuda"):
        torch.ones(2, device="cuda").sum()
    expect("Stream" in repr(side) and "Event" in repr(ready), "names")
    try:
        torch.cuda.Event().elapsed_time(end)
        raise AssertionError("an event that was not recorded has a time")
    except (RuntimeError, ValueError):
        run.keep_model(model)


@scenario(GROUP)
def memory_statistics_of_the_device(run: Run) -> None:
    train(run)
    if not run.on_cuda:
        return run.keep("kept", torch.ones(3))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    block = torch.empty(MEGABYTE, device="cuda")
    expect(torch.cuda.memory_allocated() - before == 4 * MEGABYTE, "an allocation is not counted")
    torch.cuda.reset_peak_memory_stats()
    twice = block * 2
    expect(torch.cuda.max_memory_allocated() - before >= 8 * MEGABYTE, "the peak is too low")
    del block, twice
    expect(torch.cuda.memory_allocated() == before, "a free is not counted")
    expect(torch.cuda.max_memory_allocated() >= before + 8 * MEGABYTE, "the peak was lost")
    torch.cuda.reset_peak_memory_stats()
    expect(torch.cuda.max_memory_allocated() < before + MEGABYTE, "the peak was not reset")
    expect(torch.cuda.memory_reserved() >= torch.cuda.memory_allocated(), "reserved")
    expect(torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved(), "peak of reserved")
    kept = torch.ones(3, device="cuda")
    statistics = torch.cuda.memory_stats()
    expect(statistics["allocated_bytes.all.current"] == torch.cuda.memory_allocated(), "statistics")
    expect(statistics["allocation.all.allocated"] > statistics["allocation.all.current"] > 0, "blocks")
    run.keep("kept", kept)
    torch.cuda.reset_accumulated_memory_stats()
    expect(torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0, "totals were not reset")
    summary = torch.cuda.memory_summary()
    expect("Allocated memory" in summary and "CUDA OOMs: 0" in summary, summary)
    free, total = torch.cuda.mem_get_info()
    expect(0 < free <= total == torch.cuda.get_device_properties(0).total_memory, f"{free} of {total} free")
    expect(torch.accelerator.memory_allocated() == torch.cuda.memory_allocated(), "torch.accelerator")
    expect(torch.cuda.memory_snapshot() == [], "snapshots")
    expect(torch.cuda.list_gpu_processes is not None, "processes")


@scenario(GROUP)
def properties_of_the_device(run: Run) -> None:
    train(run)
    if not run.on_cuda:
        return
    cuda = torch.cuda
    expect(cuda.is_available() and cuda.is_initialized() and torch.backends.cuda.is_built(), "available")
    expect(cuda.device_count() == 1 and cuda.current_device() == 0, "count")
    properties = cuda.get_device_properties(0)
    expect(cuda.get_device_name() == properties.name and "Understudy" in properties.name, "name")
    expect(cuda.get_device_capability() == (properties.major, properties.minor), "capability")
    expect(properties.multi_processor_count > 0 and properties.warp_size == 32, "processors")
    expect(str(torch.version.cuda).split(".")[0].isdigit(), f"version {torch.version.cuda}")
    expect(cuda.is_bf16_supported() and cuda.get_arch_list(), "architecture")
    expect(cuda.can_device_access_peer(0, 0) in (True, False), "peers")
    with cuda.device(0), cuda.device_of(torch.ones(1, device="cuda")):
        expect(torch.ones(1, device="cuda").device == torch.device("cuda:0"), "device context")
    expect(torch.accelerator.current_accelerator() == torch.device("cuda"), "accelerator")
    expect(torch.ones(1).cuda().get_device() == 0 and torch.ones(1).get_device() == -1, "get_device")
    expect(torch.get_device_module("cuda") is cuda, "module")
    with torch.device("cuda"):
        expect(torch.zeros(2).is_cuda and torch.nn.Linear(2, 2).weight.is_cuda, "default device")
    with cuda.nvtx.range("a range"):
        depth = cuda.nvtx.range_push("another")
        expect(depth == 1 and cuda.nvtx.range_pop() == 1, "depth of ranges")
        cuda.nvtx.mark("here")
    torch.cuda.set_sync_debug_mode(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    expect(0 <= cuda.utilization() <= 100, "utilization")
    for question in (cuda.temperature, cuda.power_draw, cuda.clock_rate, cuda.memory_usage):
        try:
            question()
            raise AssertionError(f"{question.__name__}() has an answer")
        except RuntimeError as error:
            expect("NVML" in str(error), f"{question.__name__}: {error}")


@scenario(GROUP)
def random_number_generators(run: Run) -> None:
    device = torch.device(run.device)
    module = torch.get_device_module(run.device) if run.on_cuda else torch

    def state() -> torch.Tensor:
        return module.get_rng_state()

    model = small_model(run, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.seed(3)
    run.keep("first", torch.rand(4, device=device))
    saved = state()
    run.keep("second", torch.randn(4, device=device))
    module.set_rng_state(saved)
    run.keep("second again", torch.randn(4, device=device))
    with torch.random.fork_rng(devices=[0] if run.on_cuda else [], device_type="cuda"):
        torch.manual_seed(9)
        run.keep("in a fork", torch.rand(3, device=device))
    run.keep("after the fork", torch.rand(3, device=device))
    for turn in range(3):
        step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)
    own = torch.Generator(device).manual_seed(5)
    run.keep("own generator", torch.randn(3, generator=own, device=device))
    run.keep("permutation", torch.randperm(9, generator=own, device=device))
    twin = torch.Generator(device)
    twin.set_state(own.get_state())
    run.keep("twin", torch.rand(3, generator=twin, device=device))
    run.keep("seed", own.initial_seed())
    if run.on_cuda:
        torch.cuda.manual_seed_all(21)
        run.keep("initial seed", torch.cuda.initial_seed())
        states = torch.cuda.get_rng_state_all()
        run.keep("seeded", torch.rand(2, device=device))
        torch.cuda.set_rng_state_all(states)
    else:
        torch.manual_seed(21)
        run.keep("initial seed", torch.initial_seed())
        states = [torch.get_rng_state()]
        run.keep("seeded", torch.rand(2))
        torch.set_rng_state(states[0])
    run.keep("seeded again", torch.rand(2, device=device))
    run.keep("samples", [
        torch.bernoulli(torch.full((5,), 0.5, device=device)),
        torch.multinomial(torch.arange(1.0, 6.0, device=device), 3),
        torch.randint(100, (4,), device=device),
        torch.empty(3, device=device).uniform_(-1, 1).exponential_(),
        torch.poisson(torch.full((4,), 3.0, device=device)),
    ])  # fmt: skip


@scenario(GROUP)
def legacy_warnings_are_few(run: Run) -> None:
    """Nothing of ours warns in a training that natively warns of nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(run, 2)
        torch.nn.LSTM(3, 3).to(run.device)(run.data(2, 2, 3))
    run.keep("warnings", [str(w.message)[:80] for w in caught])
