"""Operators of the script's own: in Python by torch.library, in C++ by a library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from script_scenario import Run, scenario, small_model, step

GROUP = "extending"


@torch.library.custom_op("understudy_script::doubled", mutates_args=(), device_types="cuda")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@doubled.register_kernel("cpu")
def _(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_nothing(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.seen = True


doubled.register_autograd(lambda ctx, gradient: gradient * 2, setup_context=_keep_nothing)


@torch.library.custom_op("understudy_script::normalised_", mutates_args={"x"})
def normalised_(x: torch.Tensor, scale: float = 1.0) -> None:
    x.div_(x.abs().max()).mul_(scale)


fragment = torch.library.Library("understudy_old", "DEF")
fragment.define("shifted(Tensor x, int by) -> Tensor")
fragment.define("both(Tensor x) -> (Tensor, Tensor)")
fragment.impl("shifted", lambda x, by: x.roll(by, 0), "CUDA")
fragment.impl("shifted", lambda x, by: x.roll(by, 0), "CPU")
fragment.impl("both", lambda x: (x + 1, x - 1), "CompositeImplicitAutograd")


@scenario(GROUP)
def operators_written_in_python(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(4):
        out = doubled(model(run.data(6, 8, seed=turn)))
        up, down = torch.ops.understudy_old.both(out)
        step(run, (up * down).mean(), optimizer)
        with torch.no_grad():
            kept = out.detach().clone()
            normalised_(kept, 2.0)
            run.keep("normalised", kept)
            run.keep("shifted", torch.ops.understudy_old.shifted(kept, 2))
    run.keep_model(model)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return torch.ops.understudy_test.scale(x, factor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


@scenario(GROUP)
def operators_written_in_cpp(run: Run) -> None:
    torch.ops.load_library(os.environ["UNDERSTUDY_TEST_LIBRARY"])
    ops = torch.ops.understudy_test
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(5):
        out = Scale.apply(model(run.data(6, 8, seed=turn)), 0.5 + turn)
        with torch.no_grad():
            weights = ops.add_one_(model[4].weight.detach().clone())
            twice, count = ops.positives(out)
            kept = [ops.keep_positive(out), ops.keep_positive(out - turn), ops.keep_positive(-out)]
            run.keep("positives", [weights, twice, count, *kept])
        step(run, out.square().mean(), optimizer)
    run.keep_model(model)


@scenario(GROUP)
def operators_without_a_kernel_for_the_device(run: Run) -> None:
    @torch.library.custom_op("understudy_script::host_only", mutates_args=(), device_types="cpu")
    def host_only(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(2):
        step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)
        if run.on_cuda:
            try:
                host_only(torch.ones(2, device="cuda"))
                raise AssertionError("an operator without a kernel ran")
            except NotImplementedError as error:
                if "understudy_script::host_only" not in str(error):
                    raise
        run.keep("host", host_only(torch.ones(2)))
    run.keep("library", Path(os.environ["UNDERSTUDY_TEST_LIBRARY"]).name)
