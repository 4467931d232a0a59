"""Pieces that train: models, optimizers, losses, gradients that ranks share, and what becomes of states."""

from __future__ import annotations

import random

from pieces import Piece, maker

OPTIMIZERS = (
    "SGD({0}, lr=0.05, foreach={1})", "SGD({0}, lr=0.05, momentum=0.9, nesterov=True, foreach={1})",
    "SGD({0}, lr=0.05, momentum=0.9, fused=True)", "Adam({0}, lr=0.01, foreach={1})",
    "Adam({0}, lr=0.01, amsgrad=True, weight_decay=0.1, foreach={1})", "AdamW({0}, lr=0.01, foreach={1})",
    "AdamW({0}, lr=0.01, fused=True)", "Adagrad({0}, lr=0.05, foreach={1})", "Adadelta({0}, foreach={1})",
    "RMSprop({0}, lr=0.01, centered=True, foreach={1})", "Adamax({0}, foreach={1})", "NAdam({0}, foreach={1})",
    "RAdam({0}, foreach={1})", "ASGD({0}, foreach={1})", "Rprop({0}, foreach={1})", "Adafactor({0}, foreach={1})",
)  # fmt: skip
"""Each with its `foreach` said: the default is another on the device than on the processor, natively, too."""
MODELS = (
    ("torch.nn.Linear(5, 4)", "(3, 5)"),
    ("torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4))",
     "(6, 5)"),
    ("torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.BatchNorm2d(3), torch.nn.GELU(), "
     "torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, 4))", "(4, 2, 6, 6)"),
    ("torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.Linear(5, 4), torch.nn.Tanh())", "(2, 3, 5)"),
    ("torch.nn.Sequential(torch.nn.Conv1d(3, 4, 2), torch.nn.GroupNorm(2, 4), torch.nn.SiLU(), torch.nn.Flatten(),"
     " torch.nn.Linear(16, 4))", "(3, 3, 5)"),
    ("torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)", "(2, 3, 4)"),
    ("torch.nn.Sequential(torch.nn.Embedding(7, 4, padding_idx=0), torch.nn.Linear(4, 4))", "(3, 2)"),
    ("torch.nn.Bilinear(5, 5, 4)", "(3, 5)"),
    ("torch.nn.GRU(5, 4)", "(3, 2, 5)"),
    ("torch.nn.LSTM(5, 4, 2, dropout=0.2, batch_first=True)", "(2, 3, 5)"),
    ("torch.nn.RNN(5, 4, bidirectional=False)", "(3, 2, 5)"),
    ("torch.nn.MultiheadAttention(4, 2)", "(3, 2, 4)"),
)  # fmt: skip
LOSSES = (
    "torch.nn.functional.mse_loss(y, torch.zeros_like(y))",
    "torch.nn.functional.smooth_l1_loss(y, torch.full_like(y, 0.3))",
    "torch.nn.functional.huber_loss(y, torch.full_like(y, -0.3), delta=0.5)",
    "torch.nn.functional.cross_entropy(y.reshape(-1, 4), torch.arange(y.numel() // 4, device=device) % 4)",
    "torch.nn.functional.cross_entropy(y.reshape(-1, 4), torch.arange(y.numel() // 4, device=device) % 4, "
    "label_smoothing=0.1, ignore_index=2)",
    "torch.nn.functional.binary_cross_entropy_with_logits(y, torch.ones_like(y) * 0.25)",
    "torch.nn.functional.kl_div(y.log_softmax(-1), torch.full_like(y, 0.25))",
    "torch.nn.functional.multi_margin_loss(y.reshape(-1, 4), torch.arange(y.numel() // 4, device=device) % 4)",
    "y.square().mean()", "y.abs().sum() / 10", "y.logsumexp(-1).sum()", "y.std()", "torch.linalg.vector_norm(y, 3)",
)  # fmt: skip


def _optimizer(chance: random.Random, parameters: str) -> str:
    return "torch.optim." + chance.choice(OPTIMIZERS).format(parameters, chance.random() < 0.5)


@maker
def training(chance: random.Random) -> Piece:
    """A model, an optimizer and a loss; with clipping, accumulation, groups, schedules, hooks, or another
    thread's backward."""
    model, shape = chance.choice(MODELS)
    parameters = "list(model.parameters())"
    if chance.random() < 0.3:
        parameters = (
            "[{'params': list(model.parameters())[:1], 'lr': 0.02}, {'params': list(model.parameters())[1:]}]"
        )
    setup = [f"with torch.device(device): model = {model}",
             f"optimizer = {_optimizer(chance, parameters)}"]  # fmt: skip
    kind = model.split("(")[0].rpartition(".")[2]
    integers = "Embedding" in model
    made = (
        f"torch.randint(0, 7, {shape}, device=device)"
        if integers
        else f"torch.randn{shape[:-1]}, device=device)"
    )
    call = {"Bilinear": "model(x, x)", "MultiheadAttention": "model(x, x, x)[0]"}.get(kind, "model(x)")
    call += "[0]" if kind in ("GRU", "LSTM", "RNN") else ""
    changing = not integers and kind != "Bilinear" and chance.random() < 0.3
    each = [f"x = {made}"]
    if changing:
        each += ["x = x[: 1 + step % x.shape[0]]", "if x.shape[0] < 2: x = x.repeat(2, *[1] * (x.dim() - 1))"]
    if (
        model.startswith("torch.nn.Linear") and chance.random() < 0.5
    ):  # of others, devices have lists of their own
        each.append(f"with torch.autocast(device.type, torch.bfloat16): y = {call}")
        each.append("y = y.float()")
    else:
        each.append(f"y = {call}")
    each.append(f"loss = {chance.choice(LOSSES)}")
    if chance.random() < 0.2:
        setup.append("seen = []")
        setup.append(
            "next(model.parameters()).register_hook(lambda grad: seen.append(grad.abs().sum().item()))"
        )
        each.append("say(step, 'hook', len(seen), sum(seen))")
    backward = "loss.backward()"
    if chance.random() < 0.15:
        setup.append("import threading")
        each.append("thread = threading.Thread(target=loss.backward); thread.start(); thread.join()")
    else:
        each.append(backward)
    if chance.random() < 0.3:
        each.append(
            f"say(step, torch.nn.utils.clip_grad_norm_(model.parameters(), {chance.choice((0.1, 1.0))}, "
            f"foreach={chance.random() < 0.5}))"
        )
    every = chance.choice((1, 1, 1, 2, 3))
    if chance.random() < 0.2:
        setup.append("schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)")
        after = ["optimizer.step()", "schedule.step()"]
    else:
        after = ["optimizer.step()"]
    after.append(f"optimizer.zero_grad(set_to_none={chance.random() < 0.7})")
    each += [f"if step % {every} == 0:", *(f"    {line}" for line in after), "say(step, loss)"]
    if chance.random() < 0.3:
        each += ["model.eval()", f"with torch.{chance.choice(('no_grad', 'inference_mode'))}():",
                 f"    say(step, {call})", "model.train()"]  # fmt: skip
    final = ("say('final', *model.state_dict().values())",)
    return Piece("training", tuple(setup), tuple(each), final)


@maker
def data_parallel(chance: random.Random) -> Piece:
    """DDP with its options, or gradients that are reduced by hand, also early and waited for late."""
    model, shape = chance.choice([one for one in MODELS if one[0].startswith(("torch.nn.Sequential", "torch.nn.L"))
                                  and "Embedding" not in one[0] and "LSTM" not in one[0]])  # fmt: skip
    setup = [f"with torch.device(device): model = {model}",
             "for one in model.parameters(): dist.broadcast(one.data, 0)"]  # fmt: skip
    by_hand = chance.random() < 0.5
    if not by_hand:
        options = chance.choice(("", ", find_unused_parameters=True", ", gradient_as_bucket_view=True",
                                 ", static_graph=True", ", bucket_cap_mb=0.0001", ", broadcast_buffers=False"))  # fmt: skip
        setup.append(f"model = torch.nn.parallel.DistributedDataParallel(model{options})")
    setup.append(f"optimizer = {_optimizer(chance, 'model.parameters()')}")
    each = [f"y = model(torch.randn{shape[:-1]}, device=device))", f"loss = {chance.choice(LOSSES[:6])}",
            "optimizer.zero_grad()"]  # fmt: skip
    if by_hand:
        form = chance.choice(("sync", "async", "hook"))
        if form == "hook":
            setup.append("works = []")
            setup.append("for one in model.parameters(): one.register_post_accumulate_grad_hook("
                         "lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))")  # fmt: skip
            each += ["loss.backward()", "for work in works: work.wait()", "works.clear()"]
        elif form == "async":
            each += ["loss.backward()",
                     "works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]",
                     "say(step, loss)", "for work in works: work.wait()"]  # fmt: skip
        else:
            each += ["loss.backward()", "for p in model.parameters(): dist.all_reduce(p.grad)"]
    else:
        each.append("loss.backward()")
    each += ["optimizer.step()", "say(step, loss)"]
    return Piece(
        "data_parallel", tuple(setup), tuple(each), ("say('final', *model.state_dict().values())",), 2
    )


@maker
def states(chance: random.Random) -> Piece:
    """What scripts do to models and optimizers between steps: kept, loaded, copied, frozen, averaged, replaced."""
    setup = ["import copy, io", "with torch.device(device): model = torch.nn.Sequential(torch.nn.Linear(4, 6), "
             "torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 2))",
             "def made(): return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)", "optimizer = made()",
             "average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, m, n: a + (m - a) / (n + 1))", "kept = copy.deepcopy(model.state_dict())",
             "kept_optimizer = copy.deepcopy(optimizer.state_dict())",
             "scaler = torch.amp.GradScaler(device.type, enabled=False)"]  # fmt: skip
    forms = (
        ["kept = copy.deepcopy(model.state_dict())", "kept_optimizer = copy.deepcopy(optimizer.state_dict())"],
        ["model.load_state_dict(kept)", "optimizer.load_state_dict(kept_optimizer)"],
        ["model.load_state_dict({name: one.clone() for name, one in kept.items()}, assign=True)", "optimizer = made()"],
        ["file = io.BytesIO()", "torch.save([model.state_dict(), optimizer.state_dict()], file)", "file.seek(0)",
         "loaded = torch.load(file, map_location=device)", "model.load_state_dict(loaded[0])", "optimizer.load_state_dict(loaded[1])"],
        ["average.update_parameters(model)", "say(step, *average.parameters())"],
        ["model = copy.deepcopy(model)", "optimizer = made()"],
        ["model[0].weight.requires_grad_(step % 2 == 0)"],
        ["for group in optimizer.param_groups: group['lr'] *= 0.9"],
        ["vector = torch.nn.utils.parameters_to_vector(model.parameters())",
         "torch.nn.utils.vector_to_parameters(vector * 0.99, model.parameters())"],
        ["with torch.no_grad():", "    for one in model.parameters(): one.mul_(0.999)"],
        ["for one in model.parameters(): one.data = one.data.clone()"],
        ["model[3].bias = torch.nn.Parameter(model[3].bias.detach() + 1)", "optimizer = made()"],
        ["torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)"],
        ["model.eval()", "with torch.no_grad(): say(step, model(torch.ones(2, 4, device=device)))", "model.train()"],
        ["say(step, sum(one.numel() for one in model.parameters()), *[one.grad for one in model.parameters() if one.grad is not None])"],
        ["optimizer.zero_grad(set_to_none=False)"], ["del optimizer", "optimizer = made()"],
        ["model.double().float()"], ["model.to('cpu').to(device)", "optimizer = made()"],
        ["if step == 3: optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(2, device=device))], 'lr': 0.5})"],
        ["model.apply(lambda one: one.reset_parameters() if step == 4 and hasattr(one, 'reset_parameters') else None)"],
        ["torch.nn.utils.prune.l1_unstructured(model[3], 'weight', 1) if step == 2 else None"],
        ["with torch.random.fork_rng(devices=[device.index] if on_device else [], device_type=device.type): say(step, torch.rand(2, device=device))"],
        ["say(step, str(optimizer.state_dict()['param_groups'][0]['lr']), len(optimizer.state))"],
    )  # fmt: skip
    each = [
        "x = torch.randn(5, 4, device=device)",
        "loss = model(x).square().mean()",
        "scaler.scale(loss).backward()",
    ]
    before = [line for form in chance.sample(forms, chance.randint(0, 2)) for line in form]
    after = [line for form in chance.sample(forms, chance.randint(1, 3)) for line in form]
    step = [
        *each,
        *before,
        "scaler.step(optimizer)",
        "scaler.update()",
        "optimizer.zero_grad()",
        *after,
        "say(step, loss)",
    ]
    return Piece(
        "states",
        ("import torch.nn.utils.prune", *setup),
        tuple(step),
        ("say('final', *model.state_dict().values())",),
    )
