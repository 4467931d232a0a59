"""Ways to optimise: accumulation, several optimizers, closures, schedulers, clipping, averages."""

from __future__ import annotations

import torch
from script_scenario import Run, scenario, small_model, step
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

GROUP = "optimizing"
# On cuda PyTorch chooses foreach by itself, and ASGD, for one, then rounds in another order.
FOREACH: dict[str, object] = {"foreach": True}
OPTIMIZERS: dict[str, dict[str, object]] = {
    "Adadelta": FOREACH,
    "Adagrad": FOREACH,
    "Adam": {"amsgrad": True, **FOREACH},
    "AdamW": {"fused": True},
    "Adamax": FOREACH,
    "ASGD": FOREACH,
    "NAdam": FOREACH,
    "RAdam": FOREACH,
    "RMSprop": {"momentum": 0.9, "centered": True, **FOREACH},
    "Rprop": FOREACH,
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "foreach": False},
}


def loss_of(run: Run, model: torch.nn.Module, seed: int) -> torch.Tensor:
    return F.cross_entropy(model(run.data(6, 8, seed=seed)), run.labels(6, 4, seed=seed))


@scenario(GROUP)
def gradient_accumulation(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for outer in range(4):
        for inner in range(3):
            loss = loss_of(run, model, 3 * outer + inner) / 3
            loss.backward()
            run.keep("loss", loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=outer % 2 == 0)
    run.keep_model(model)


@scenario(GROUP)
def several_optimizers_that_step_in_turns(run: Run) -> None:
    body, head = small_model(run), torch.nn.Linear(4, 2).to(run.device)
    first = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.Adam(head.parameters(), lr=0.01)
    for turn in range(5):
        loss = head(body(run.data(6, 8, seed=turn))).square().mean()
        loss.backward()
        first.step()
        if turn % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
        run.keep("loss", loss)
    run.keep_model(body)
    run.keep_model(head)


@scenario(GROUP)
def every_optimizer_of_pytorch_takes_three_steps(run: Run) -> None:
    for name, options in OPTIMIZERS.items():
        model = small_model(run)
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        for turn in range(3):
            step(run, loss_of(run, model, turn), optimizer)
        run.keep_model(model)


@scenario(GROUP)
def closures_of_lbfgs(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe"
    )
    for turn in range(3):

        def closure(turn: int = turn) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(run, model, turn)
            loss.backward()
            return loss

        run.keep("loss", optimizer.step(closure))
    run.keep_model(model)


@scenario(GROUP)
def learning_rate_schedulers(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[2])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for turn in range(6):
        loss = loss_of(run, model, turn)
        step(run, loss, optimizer)
        sequence.step()
        plateau.step(loss)
        run.keep("rate", optimizer.param_groups[0]["lr"])
    one_cycle_optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device=run.device))
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(one_cycle_optimizer, 0.05, total_steps=5)
    for turn in range(4):
        step(run, loss_of(run, model, turn), one_cycle_optimizer)
        one_cycle.step()
    run.keep_model(model)


@scenario(GROUP)
def gradient_clipping(run: Run) -> None:
    model = small_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for turn in range(4):
        loss = loss_of(run, model, turn)
        loss.backward()
        if turn % 2:
            run.keep("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=turn == 1))
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        run.keep("total", torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    run.keep_model(model)


@scenario(GROUP)
def averaged_weights(run: Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    model = model.to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    # On the CPU its default is another formula than on a GPU, with other bits.
    swa = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    rates = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    by_hand = [p.detach().clone() for p in model.parameters()]
    for turn in range(4):
        step(run, loss_of(run, model, turn), optimizer)
        ema.update_parameters(model)
        with torch.no_grad():
            for mean, p in zip(by_hand, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        if turn >= 2:
            swa.update_parameters(model)
            rates.step()
    update_bn([run.data(6, 8, seed=turn) for turn in range(3)], swa)
    run.keep_model(ema)
    run.keep_model(swa)
    run.keep("by hand", by_hand)
