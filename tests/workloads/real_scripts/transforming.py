"""torch.func, vmap, forward-mode derivatives."""

from __future__ import annotations

import torch
from script_scenario import Run, scenario, small_model, step
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

GROUP = "programming"


def loss_of(model: torch.nn.Module, weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (functional_call(model, weights, (x.unsqueeze(0),)).squeeze(0) - y).square().mean()


@scenario(GROUP)
def gradients_per_sample(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        x, y = run.data(5, 8, seed=turn), run.data(5, 4, seed=turn + 50)
        per_sample = vmap(grad(lambda w, a, b: loss_of(model, w, a, b)), in_dims=(None, 0, 0))(weights, x, y)
        for name, p in model.named_parameters():
            p.grad = per_sample[name].mean(0)
            run.keep(name, per_sample[name])
        optimizer.step()
        optimizer.zero_grad()
    run.keep_model(model)


@scenario(GROUP)
def training_by_pure_functions(run: Run) -> None:
    model = small_model(run)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=run.device))], lr=0.1)
    for turn in range(3):
        x, y = run.data(8, seed=turn), run.data(4, seed=turn + 50)
        gradients, value = grad_and_value(lambda w, x=x, y=y: loss_of(model, w, x, y))(weights)
        weights = {name: w - 0.1 * gradients[name] for name, w in weights.items()}
        dummy.step()
        run.keep("loss", value)
    run.keep("weights", list(weights.values()))


@scenario(GROUP)
def jacobians_and_directions(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(2):
        x = run.data(8, seed=turn)

        def f(x: torch.Tensor) -> torch.Tensor:
            return model(x.unsqueeze(0)).squeeze(0).tanh()

        run.keep("jacobian", jacrev(f)(x))
        run.keep("hessian", hessian(lambda x: f(x).sum())(x))
        out, tangent = jvp(f, (x,), (torch.ones_like(x),))
        run.keep("jvp", [out, tangent])
        out, pull = vjp(f, x)
        run.keep("vjp", pull(torch.ones_like(out))[0])
        step(run, f(x).square().mean(), optimizer)
    run.keep_model(model)


@scenario(GROUP)
def ensembles_by_vmap(run: Run) -> None:
    models = [small_model(run) for _ in range(3)]
    weights, buffers = stack_module_state(models)
    optimizer = torch.optim.SGD(list(weights.values()), lr=0.1)
    for turn in range(3):
        x = run.data(3, 6, 8, seed=turn)
        out = vmap(lambda w, b, x: functional_call(models[0], (w, b), (x,)))(weights, buffers, x)
        step(run, out.square().mean(), optimizer)
    run.keep("weights", list(weights.values()))


@scenario(GROUP)
def randomness_under_vmap(run: Run) -> None:
    model = small_model(run, dropout=0.4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.seed(8)
    for randomness in ("different", "same"):
        for turn in range(2):
            x = run.data(4, 6, 8, seed=turn)
            out = vmap(model, randomness=randomness)(x)
            step(run, out.square().mean(), optimizer)
            noise = vmap(
                lambda x: torch.rand_like(x) + torch.randn(8, device=x.device), randomness=randomness
            )(x)
            run.keep("noise", noise)
    run.keep_model(model)
