"""Activation checkpointing, with the random numbers of dropout repeated in the second forward pass."""

from __future__ import annotations

import torch
from script_scenario import Run, scenario, small_model, step
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

GROUP = "memory"


def train(run: Run, **options: bool) -> None:
    model = small_model(run, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.seed(5)
    for turn in range(4):
        x = run.data(6, 8, seed=turn).requires_grad_()
        loss = checkpoint(model, x, **options).square().mean()
        step(run, loss, optimizer)
        run.keep("gradient", x.grad)
    run.keep_model(model)


@scenario(GROUP)
def checkpoint_that_is_not_reentrant(run: Run) -> None:
    train(run, use_reentrant=False)


@scenario(GROUP)
def checkpoint_that_is_reentrant(run: Run) -> None:
    train(run, use_reentrant=True)


@scenario(GROUP)
def checkpoint_that_draws_new_random_numbers(run: Run) -> None:
    train(run, use_reentrant=False, preserve_rng_state=False)


@scenario(GROUP)
def checkpoint_of_a_sequence(run: Run) -> None:
    model = small_model(run, dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.seed(6)
    for turn in range(3):
        x = run.data(6, 8, seed=turn).requires_grad_()
        step(run, checkpoint_sequential(model, 2, x, use_reentrant=False).square().mean(), optimizer)
    run.keep_model(model)


@scenario(GROUP)
def saved_tensors_on_the_host(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        with torch.autograd.graph.save_on_cpu(pin_memory=run.on_cuda, device_type="cuda"):
            loss = model(run.data(6, 8, seed=turn)).square().mean()
        step(run, loss, optimizer)
    run.keep_model(model)
