"""Hooks of every kind, parametrizations, pruning, functions with derivatives of their own."""

from __future__ import annotations

from typing import Any

import torch
from script_scenario import Run, scenario, small_model, step
from torch.nn.utils import parametrizations, parametrize, prune

GROUP = "programming"


@scenario(GROUP)
def hooks_of_every_kind(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    model[0].register_forward_hook(lambda _, __, out: out + 1)
    model[2].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
    model[2].register_full_backward_hook(lambda _, into, __: (into[0].clamp(-1, 1),))
    model[4].weight.register_hook(lambda gradient: gradient * 0.5)
    model[4].bias.register_post_accumulate_grad_hook(lambda p: seen.append(f"bias {p.grad is not None}"))
    model.register_state_dict_post_hook(lambda *_: seen.append("state"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for turn in range(3):
        x = run.data(6, 8, seed=turn).requires_grad_()
        out = model(x)
        out.register_hook(lambda gradient: run.keep("gradient of out", gradient))
        x.retain_grad()
        torch.autograd.graph.register_multi_grad_hook((x, model[0].weight), lambda _: seen.append("all"))
        step(run, out.square().mean(), optimizer)
        run.keep("gradient", x.grad)
    run.keep_model(model)
    run.keep("seen", seen)


@scenario(GROUP)
def optimizer_steps_inside_backward(run: Run) -> None:
    model = small_model(run)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def apply(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)
    for turn in range(2):
        loss = model(run.data(6, 8, seed=turn)).square().mean()
        loss.backward()
        run.keep("loss", loss)
    run.keep_model(model)


class Symmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@scenario(GROUP)
def parametrizations_and_pruning(run: Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5))).to(run.device)
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.weight_norm(model[1])
    run.seed(1)  # the first estimate of the largest singular vectors is drawn on the device
    parametrizations.spectral_norm(model[2])
    prune.l1_unstructured(model[3], "weight", amount=0.3)
    parametrizations.orthogonal(model[4], orthogonal_map="cayley", use_trivialization=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for turn in range(3):
        step(run, model(run.data(6, 8, seed=turn)).square().mean(), optimizer)
    run.keep_model(model)
    prune.remove(model[3], "weight")
    parametrize.remove_parametrizations(model[0], "weight")
    run.keep("symmetric", model[0].weight)
    run.keep("pruned", model[3].weight)
    run.keep("vector", torch.nn.utils.parameters_to_vector(model[1].parameters()))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.exp() * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.exp() * ctx.factor, None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, mask = x.clamp(min=0), x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return out, mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class WithContext(torch.autograd.Function):
    """The newer form, which torch.func can take apart."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].cos()


@scenario(GROUP)
def functions_with_derivatives_of_their_own(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for turn in range(3):
        x = run.data(6, 8, seed=turn).requires_grad_()
        hidden = Scaled.apply(model(x).tanh(), 0.5)
        positive, mask = Once.apply(hidden - 0.5)
        loss = InPlace.apply(positive * 1.0).mean() + WithContext.apply(hidden).sum()
        run.keep("mask", mask)
        step(run, loss, optimizer)
        (first,) = torch.autograd.grad(Scaled.apply(x, 2.0).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        run.keep("second derivative", second)
        run.keep(
            "under vmap", torch.func.vmap(torch.func.grad(lambda y: WithContext.apply(y).sum()))(x.detach())
        )
    run.keep_model(model)
