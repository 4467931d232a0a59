"""Mixed precision. On cuda other operators are cast than on the CPU, so each scenario says what it equals."""

from __future__ import annotations

import warnings

import torch
from script_scenario import Run, scenario
from torch.nn import functional as F

GROUP = "memory"


def matrix_model(run: Run) -> torch.nn.Module:
    """Only operators that both lists treat alike: linear and convolution are cast, relu follows its input."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv1d(2, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 4),
    ).to(run.device)


def batch(run: Run, turn: int) -> torch.Tensor:
    return run.data(6, 2, 8, seed=turn)


@scenario(GROUP)
def autocast_to_bfloat16_equals_autocast_on_the_cpu(run: Run) -> None:
    model = matrix_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for turn in range(4):
        with torch.autocast(run.device, dtype=torch.bfloat16):
            out = model(batch(run, turn))
        run.keep("type", str(out.dtype))
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep("loss", loss)
    run.keep_model(model)


@scenario(GROUP)
def gradient_scaler_skips_a_step_whose_gradients_overflow(run: Run) -> None:
    model = matrix_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(run.device, init_scale=2.0**10, growth_interval=2)
    for turn in range(6):
        with torch.autocast(run.device, dtype=torch.float16):
            out = model(batch(run, turn))
        loss = out.float().square().mean()
        if turn == 2:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.keep("scale", scaler.get_scale())
        run.keep("loss", loss)
    run.keep("scaler", str(sorted(scaler.state_dict().items())))
    run.keep_model(model)


@scenario(GROUP)
def autocast_for_cuda_equals_its_casts_written_out(run: Run) -> None:
    """The CUDA list casts softmax, norms, sums, powers and nll_loss to float32; here that is done by hand.

    Not log_softmax inside cross_entropy, which asks for its input's type.
    """
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 16).to(run.device), torch.nn.Linear(16, 4).to(run.device)
    norm = torch.nn.LayerNorm(16).to(run.device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *norm.parameters()], lr=0.1)

    def low(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())

    for turn in range(4):
        x, labels = run.data(6, 8, seed=turn), run.labels(6, 4, seed=turn)
        if run.on_cuda:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                hidden = first(x)
                attention = hidden.softmax(-1)
                logits = second(norm(attention * hidden))
                loss = F.cross_entropy(logits, labels) + logits.pow(2).sum() * 0.01
        else:
            hidden = low(first, x)
            attention = hidden.float().softmax(-1)
            logits = low(second, F.layer_norm(attention * hidden, (16,), norm.weight, norm.bias))
            loss = F.nll_loss(F.log_softmax(logits, -1).float(), labels)
            loss = loss + logits.float().pow(2).sum() * 0.01
        run.keep("types", [str(t.dtype) for t in (hidden, attention, logits, loss)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep("loss", loss)
    run.keep("weights", [first.weight, second.weight])


@scenario(GROUP)
def old_names_of_mixed_precision(run: Run) -> None:
    model = matrix_model(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if run.on_cuda:
            autocast, scaler = torch.cuda.amp.autocast, torch.cuda.amp.GradScaler(init_scale=8.0)
        else:
            autocast, scaler = torch.cpu.amp.autocast, torch.cpu.amp.GradScaler(init_scale=8.0)
        for turn in range(3):
            with autocast(dtype=torch.bfloat16):
                loss = model(batch(run, turn)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.keep("loss", loss)
    with torch.autocast(run.device, enabled=False):
        run.keep("off", model(batch(run, 9)))
