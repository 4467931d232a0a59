"""Recurrent layers of all kinds, CTC loss, embedding bags."""

from __future__ import annotations

from typing import Any

import torch
from script_scenario import Run, scenario, step
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

GROUP = "recurrent"
KINDS: dict[str, dict[str, Any]] = {
    "LSTM": {"num_layers": 2},
    "LSTM in both directions": {"bidirectional": True, "num_layers": 2, "batch_first": True},
    "LSTM without bias": {"bias": False},
    "LSTM with projections": {"proj_size": 3, "num_layers": 2, "bidirectional": True},
    "GRU": {"num_layers": 2},
    "GRU in both directions": {"bidirectional": True, "num_layers": 2, "batch_first": True},
    "GRU without bias": {"bias": False},
    "RNN": {"num_layers": 2, "bidirectional": True},
    "RNN with relu": {"nonlinearity": "relu", "batch_first": True},
}


def make(run: Run, name: str, **more: float) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = getattr(torch.nn, name.split()[0])
    return layer(5, 6, **KINDS[name], **more).to(run.device)


def states(hidden: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [hidden] if isinstance(hidden, torch.Tensor) else list(hidden)


def train(run: Run, model: torch.nn.Module, *, packed: bool = False, turns: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = bool(getattr(model, "batch_first", False))
    for turn in range(turns):
        x = run.data(4, 7, 5, seed=turn) if first else run.data(7, 4, 5, seed=turn)
        x.requires_grad_()
        if packed:
            sequence = pack_padded_sequence(x, torch.tensor([7, 5, 5, 2]), batch_first=first)
            out, hidden = model(sequence)
            out, lengths = pad_packed_sequence(out, batch_first=first)
            run.keep("lengths", lengths)
        else:
            out, hidden = model(x)
        loss = out.square().mean() + sum(state.mean() for state in states(hidden))
        step(run, loss, optimizer)
        run.keep("gradient", x.grad)
        run.keep("state", states(hidden))
    run.keep_model(model)


@scenario(GROUP)
def recurrent_layers_of_every_kind(run: Run) -> None:
    for name in KINDS:
        train(run, make(run, name))


@scenario(GROUP)
def packed_sequences(run: Run) -> None:
    for name in KINDS:
        train(run, make(run, name), packed=True)


@scenario(GROUP)
def recurrent_layers_with_dropout_between_them(run: Run) -> None:
    for name in ("LSTM", "LSTM in both directions", "GRU", "RNN"):
        model = make(run, name, dropout=0.4)
        run.seed(3)
        train(run, model)
        run.seed(4)
        train(run, model, packed=True, turns=1)
        model.eval()
        with torch.no_grad():
            run.keep("evaluation", model(run.data(7, 4, 5))[0])


@scenario(GROUP)
def recurrent_layers_in_double_and_bfloat16(run: Run) -> None:
    for name in ("LSTM", "GRU"):
        for dtype in (torch.float64, torch.bfloat16):
            model = make(run, name).to(dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for turn in range(2):
                out, _ = model(run.data(7, 4, 5, seed=turn).to(dtype))
                step(run, out.square().mean(), optimizer)
            run.keep_model(model)


@scenario(GROUP)
def recurrent_cells(run: Run) -> None:
    for cell in (torch.nn.LSTMCell, torch.nn.GRUCell, torch.nn.RNNCell):
        torch.manual_seed(0)
        model = cell(5, 6).to(run.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for turn in range(3):
            hidden = None
            for x in run.data(4, 3, 5, seed=turn):
                hidden = model(x, hidden)
            step(run, sum(state.square().mean() for state in states(hidden)), optimizer)
        run.keep_model(model)


@scenario(GROUP)
def second_derivative_of_a_gru(run: Run) -> None:
    model = make(run, "GRU")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(2):
        x = run.data(7, 4, 5, seed=turn).requires_grad_()
        out = model(x)[0].square().sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        step(run, gradient.square().sum() + out, optimizer)
    run.keep_model(model)


@scenario(GROUP)
def ctc_loss(run: Run) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 8).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets = run.labels(12, 7).reshape(3, 4) + 1
    lengths, target_lengths = torch.tensor([9, 8, 9]), torch.tensor([4, 3, 2])
    for turn in range(4):
        log_probs = F.log_softmax(model(run.data(9, 3, 5, seed=turn)), -1)
        if turn % 2:
            given, wanted = lengths.to(run.device), target_lengths.to(run.device)
        else:
            given, wanted = lengths.tolist(), target_lengths.tolist()
        flat = torch.cat([row[:n] for row, n in zip(targets, [4, 3, 2], strict=True)])
        loss = F.ctc_loss(log_probs, targets if turn < 2 else flat, given, wanted, zero_infinity=True)
        step(run, loss, optimizer)
    run.keep_model(model)


@scenario(GROUP)
def embedding_bags(run: Run) -> None:
    for mode in ("sum", "mean", "max"):
        torch.manual_seed(0)
        bag = torch.nn.EmbeddingBag(20, 6, mode=mode, padding_idx=0).to(run.device)
        plain = torch.nn.Embedding(20, 6, max_norm=1.0, scale_grad_by_freq=True).to(run.device)
        optimizer = torch.optim.SGD([*bag.parameters(), *plain.parameters()], lr=0.5)
        for turn in range(3):
            tokens = run.labels(12, 20, seed=turn)
            offsets = torch.tensor([0, 5, 5, 9], device=run.device)
            weights = run.data(12, seed=turn).abs() if mode == "sum" else None
            rows = bag(tokens, offsets, per_sample_weights=weights)
            loss = rows.square().mean() + bag(tokens.reshape(3, 4)).mean() + plain(tokens).square().mean()
            step(run, loss, optimizer)
        run.keep_model(bag)
        run.keep_model(plain)
