"""What the client computes instead of PyTorch: attention, recurrent layers and cells, CTC loss, dropout.

The same calls on the CPU and on the device over a grid of arguments; results, gradients and errors are
compared bit for bit.

`composites.py FAMILY` prints `RESULT` and {"cases": …, "raised": …, "differ": [name, what]…}.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

# A case takes a device, and returns what it computed. Whatever it draws, it draws after `torch.manual_seed`.
Case = Callable[[str], list[torch.Tensor]]
FLOAT, DOUBLE, HALF, BFLOAT = torch.float32, torch.float64, torch.float16, torch.bfloat16


def drawn(*shape: int, dtype: torch.dtype, device: str, gradient: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, device="cpu").to(dtype).to(device).requires_grad_(gradient)


def with_gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """`outputs`, and the gradients of `inputs` for a sum that weighs each number differently."""
    differentiable = [out for out in outputs if out.requires_grad]
    if not differentiable:
        return outputs
    weights = [
        torch.linspace(-1, 1, out.numel(), dtype=DOUBLE).reshape(out.shape).to(out.dtype).to(out.device)
        for out in differentiable
    ]
    gradients = torch.autograd.grad(differentiable, inputs, weights, allow_unused=True)
    return outputs + [gradient for gradient in gradients if gradient is not None]


# ---- attention


def mask_of(
    kind: str, batch: tuple[int, ...], length: int, width: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Drawn on the CPU. A row of which all is masked is NaN on one native path and zeros on another."""
    some = torch.rand(*batch, length, width) > 0.4
    some[..., 0] = True
    return {
        "none": lambda: None,
        "boolean": lambda: some,
        "boolean, one for all": lambda: some.reshape(-1, length, width)[0],
        "boolean, of padding": lambda: some[..., :1, :],
        "boolean, an empty row": lambda: some & (torch.arange(length) != 1)[:, None],
        "added": lambda: torch.randn(*batch, length, width).to(dtype),
        "added, one for all": lambda: torch.randn(length, width).to(dtype).requires_grad_(),
        "added, double": lambda: torch.randn(length, width, dtype=DOUBLE),
    }[kind]()


MASKS = (
    "none",
    "boolean",
    "boolean, one for all",
    "boolean, of padding",
    "boolean, an empty row",
    "added",
    "added, one for all",
    "added, double",
)
# (shape before heads, heads of query, of key and value, enable_gqa)
HEADS = {
    "4 of 4": ((2,), 4, 4, False),
    "4 of 2, grouped": ((2,), 4, 2, True),
    "4 of 1": ((2,), 4, 1, False),
    "4 of 3": ((2,), 4, 3, True),
    "three dimensions": ((), 4, 4, False),
    "five": ((2, 2), 4, 4, False),
    "no batch, no heads": ((), 0, 0, False),
}


def attention(
    dtype: torch.dtype,
    mask: str,
    dropout: float,
    heads: str,
    value_width: int,
    causal: bool,
    kernel: SDPBackend | None,
    layout: str,
) -> Case:
    before, of_query, of_key, grouped = HEADS[heads]
    length, keys, width = 5, 7 if not causal else 5, 8

    def on(device: str) -> list[torch.Tensor]:
        def made(count: int, rows: int, columns: int) -> torch.Tensor:
            shape = (*before, *([count] if count else []), rows, columns)
            if layout == "heads last" and count:
                swapped = (*shape[:-3], rows, count, columns)
                return drawn(*swapped, dtype=dtype, device=device).transpose(-2, -3)
            return drawn(*shape, dtype=dtype, device=device, gradient=layout != "no gradients")

        q, k, v = made(of_query, length, width), made(of_key, keys, width), made(of_key, keys, value_width)
        given = mask_of(mask, (*before, *([of_query] if of_query else [])), length, keys, dtype)
        inputs = [x for x in (q, k, v) if x.requires_grad]
        if given is not None:
            learns, given = given.requires_grad, given.detach().to(device)
            if learns:
                inputs.append(given.requires_grad_())
        torch.manual_seed(1)
        arguments: dict[str, Any] = {
            "attn_mask": given,
            "dropout_p": dropout,
            "is_causal": causal,
            "enable_gqa": grouped,
        }
        if kernel is None:
            out = functional.scaled_dot_product_attention(q, k, v, **arguments)
        else:
            with sdpa_kernel(kernel):
                out = functional.scaled_dot_product_attention(q, k, v, scale=0.3, **arguments)
        return with_gradients([out], inputs)

    return on


def attentions() -> Iterator[tuple[str, Case]]:
    everything = itertools.product(
        (FLOAT, DOUBLE, HALF, BFLOAT), MASKS, (0.0, 0.3), HEADS, (8, 6), (False, True)
    )
    for dtype, mask, dropout, heads, value_width, causal in everything:
        if causal and mask != "none":
            continue  # refused by all; one case of it is below
        name = f"attention {dtype}, mask {mask}, {dropout}, {heads}, values {value_width}, causal {causal}"
        yield name, attention(dtype, mask, dropout, heads, value_width, causal, None, "usual")
    yield "attention with mask and causal", attention(FLOAT, "boolean", 0.0, "4 of 4", 8, True, None, "usual")
    for mask, kernel, layout in itertools.product(
        MASKS, (None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION), ("heads last", "no gradients")
    ):
        name = f"attention by {kernel}, mask {mask}, {layout}"
        yield name, attention(FLOAT, mask, 0.0, "4 of 4", 8, False, kernel, layout)


def attention_modules() -> Iterator[tuple[str, Case]]:
    for training, mask, padding, need_weights, batch_first, dropout in itertools.product(
        (True, False),
        ("none", "boolean", "added"),
        ("none", "boolean", "added"),
        (True, False),
        (True, False),
        (0.0, 0.2),
    ):
        name = (
            f"MultiheadAttention, training {training}, mask {mask}, padding {padding}, {need_weights}, "
            f"batch first {batch_first}, dropout {dropout}"
        )
        yield name, multihead(training, mask, padding, need_weights, batch_first, dropout)
    for training, padding, norm_first, gradient in itertools.product(
        (True, False), ("none", "boolean"), (True, False), (True, False)
    ):
        name = (
            f"encoder, training {training}, padding {padding}, norm first {norm_first}, gradient {gradient}"
        )
        yield name, encoder(training, padding, norm_first, gradient)


def padding_of(kind: str) -> torch.Tensor | None:
    """(2, 5): the second sequence is two shorter."""
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return {"none": None, "boolean": hidden, "added": torch.zeros(2, 5).masked_fill(hidden, float("-inf"))}[
        kind
    ]


def multihead(
    training: bool, mask: str, padding: str, need_weights: bool, batch_first: bool, dropout: float
) -> Case:
    def on(device: str) -> list[torch.Tensor]:
        layer = (
            nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=batch_first).train(training).to(device)
        )
        x = drawn(*((2, 5, 8) if batch_first else (5, 2, 8)), dtype=FLOAT, device=device)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        masks = {
            "none": None,
            "boolean": causal,
            "added": torch.zeros(5, 5).masked_fill(causal, float("-inf")),
        }
        given, hidden = (t if t is None else t.to(device) for t in (masks[mask], padding_of(padding)))
        torch.manual_seed(1)
        out, weights = layer(x, x, x, key_padding_mask=hidden, need_weights=need_weights, attn_mask=given)
        outputs = [out] if weights is None else [out, weights]
        return with_gradients(outputs, [x, *layer.parameters()])

    return on


def encoder(training: bool, padding: str, norm_first: bool, gradient: bool) -> Case:
    def on(device: str) -> list[torch.Tensor]:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
        model = nn.TransformerEncoder(layer, 2).train(training).to(device)
        x = drawn(2, 5, 8, dtype=FLOAT, device=device)
        hidden = padding_of(padding)
        torch.manual_seed(1)
        with torch.set_grad_enabled(gradient):
            out = model(x, src_key_padding_mask=hidden if hidden is None else hidden.to(device))
            return with_gradients([out], [x, *model.parameters()])

    return on


# ---- recurrent layers


def patterns(batch: int, longest: int) -> Iterator[tuple[int, ...]]:
    """All lengths of `batch` sequences, longest first."""
    lengths = range(longest, 0, -1)
    return itertools.combinations_with_replacement(lengths, batch)


def flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [tensor for part in result for tensor in flat(part)]


Given = str | tuple[int, ...]
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def recurrent(
    kind: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    given: Given,
    states: bool,
    training: bool = True,
    gradient: bool = True,
) -> Case:
    """`given`: "padded", "alone" (no batch), "shuffled" (packed, unsorted), or lengths to be packed."""

    def on(device: str) -> list[torch.Tensor]:
        layer = KINDS[kind](4, 6, **options).to(dtype).to(device).train(training)
        inputs: list[torch.Tensor] = list(layer.parameters())
        sequence: torch.Tensor | PackedSequence
        batch: list[int] = []
        if given == "alone":
            sequence = drawn(3, 4, dtype=dtype, device=device)
            inputs.append(sequence)
        elif given == "padded":
            batch = [3]
            sequence = drawn(
                *((3, 4, 4) if options.get("batch_first") else (4, 3, 4)), dtype=dtype, device=device
            )
            inputs.append(sequence)
        else:
            lengths = (2, 4, 1) if isinstance(given, str) else given
            batch = [len(lengths)]
            parts = [drawn(n, 4, dtype=dtype, device=device) for n in lengths]
            inputs += parts
            sequence = pack_sequence(parts, enforce_sorted=given != "shuffled")
        initial: Any = None
        if states:
            count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
            first = drawn(count, *batch, options.get("proj_size") or 6, dtype=dtype, device=device)
            inputs.append(first)
            initial = first
            if kind == "LSTM":
                initial = (first, drawn(count, *batch, 6, dtype=dtype, device=device))
                inputs.append(initial[1])
        torch.manual_seed(1)
        with torch.set_grad_enabled(gradient):
            return with_gradients(flat(layer(sequence, initial)), inputs)

    return on


def recurrents() -> Iterator[tuple[str, Case]]:
    lengths: list[Given] = [*patterns(3, 3), *patterns(1, 4), (4, 4), (5, 3, 3, 1)]
    for kind, both, layers, bias in itertools.product(KINDS, (False, True), (1, 2), (True, False)):
        options = {
            "bidirectional": both,
            "num_layers": layers,
            "bias": bias,
            "dropout": 0.3 if layers > 1 else 0.0,
        }
        given: Given
        for given in ("padded", "alone", "shuffled", *lengths):
            for dtype in (FLOAT, DOUBLE):
                yield (
                    f"{kind} {options} {dtype} {given}",
                    recurrent(kind, options, dtype, given, states=both != bias),
                )
        few: list[Given] = ["padded", (3, 3), (3, 1)]
        for given, dtype in itertools.product(few, (HALF, BFLOAT)):
            for gradient in (True, False):
                name = f"{kind} {options} {dtype} {given}, gradient {gradient}"
                yield name, recurrent(kind, options, dtype, given, True, True, gradient)
        for given, training, gradient in itertools.product(few, (True, False), (True, False)):
            options = options | {"batch_first": True}
            name = f"{kind} {options} {given}, training {training}, gradient {gradient}"
            yield name, recurrent(kind, options, FLOAT, given, False, training, gradient)
    all_forms: list[Given] = ["padded", "alone", *lengths]
    for both, layers, given in itertools.product((False, True), (1, 2), all_forms):
        options = {"bidirectional": both, "num_layers": layers, "proj_size": 3}
        yield f"LSTM {options} {given}", recurrent("LSTM", options, FLOAT, given, states=True)
    for given in all_forms:
        yield f"RNN with relu {given}", recurrent("RNN", {"nonlinearity": "relu"}, FLOAT, given, states=True)


def cells() -> Iterator[tuple[str, Case]]:
    def cell(make: Any, dtype: torch.dtype, batch: bool, bias: bool, states: bool) -> Case:
        def on(device: str) -> list[torch.Tensor]:
            layer = make(4, 6, bias=bias).to(dtype).to(device)
            x = drawn(*((3, 4) if batch else (4,)), dtype=dtype, device=device)
            h = drawn(*((3, 6) if batch else (6,)), dtype=dtype, device=device)
            initial: Any = ((h, h * 2) if make is nn.LSTMCell else h) if states else None
            return with_gradients(flat(layer(x, initial)), [x, *([h] if states else []), *layer.parameters()])

        return on

    for make, dtype, batch, bias, states in itertools.product(
        (nn.LSTMCell, nn.GRUCell, nn.RNNCell),
        (FLOAT, DOUBLE, BFLOAT),
        (True, False),
        (True, False),
        (True, False),
    ):
        yield (
            f"{make.__name__} {dtype} batch {batch} bias {bias} states {states}",
            cell(make, dtype, batch, bias, states),
        )


def ctc_losses() -> Iterator[tuple[str, Case]]:
    def loss(
        dtype: torch.dtype, reduction: str, infinity: bool, lengths: str, targets: str, blank: int
    ) -> Case:
        def on(device: str) -> list[torch.Tensor]:
            scores = drawn(6, 3, 5, dtype=dtype, device=device)
            labels = torch.randint(1, 5, (3, 3)) if blank == 0 else torch.randint(0, 4, (3, 3))
            sizes = torch.tensor([3, 2, 1])
            if targets == "one row":
                labels = torch.cat([row[:n] for row, n in zip(labels, sizes.tolist(), strict=True)])
            given: Any = ((6, 5, 2), (3, 2, 1)) if lengths == "tuples" else (torch.tensor([6, 5, 2]), sizes)
            if lengths == "on the device":
                given = tuple(t.to(device) for t in given)
            log_probabilities = scores.log_softmax(2)
            out = functional.ctc_loss(
                log_probabilities, labels.to(device), *given, blank, reduction, zero_infinity=infinity
            )
            return with_gradients([out], [scores])

        return on

    for arguments in itertools.product(
        (FLOAT, DOUBLE),
        ("none", "sum", "mean"),
        (True, False),
        ("tuples", "tensors", "on the device"),
        ("rows", "one row"),
        (0, 4),
    ):
        yield f"ctc_loss {arguments}", loss(*arguments)


def dropouts() -> Iterator[tuple[str, Case]]:
    def dropout(kind: str, dtype: torch.dtype, probability: float, gradient: bool, training: bool) -> Case:
        def on(device: str) -> list[torch.Tensor]:
            x = drawn(4, 5, 6, dtype=dtype, device=device, gradient=gradient)
            torch.manual_seed(1)
            given = x * 1 if kind == "in place" else x  # a leaf cannot be written
            out = {
                "usual": functional.dropout,
                "in place": functools.partial(functional.dropout, inplace=True),
                "of channels": functional.dropout1d,
                "alpha": functional.alpha_dropout,
                "alpha of channels": functional.feature_alpha_dropout,
            }[kind](given, probability, training)
            return with_gradients([out], [x])

        return on

    for kind, dtype, percent in itertools.product(
        ("usual", "in place", "of channels", "alpha", "alpha of channels"),
        (FLOAT, DOUBLE, HALF, BFLOAT),
        range(0, 101, 3),
    ):
        for gradient, training in (
            ((True, True), (False, True), (True, False)) if percent % 12 == 0 else ((True, True),)
        ):
            name = f"dropout {kind}, {dtype}, {percent} %, gradient {gradient}, training {training}"
            yield name, dropout(kind, dtype, percent / 100, gradient, training)


def packings() -> Iterator[tuple[str, Case]]:
    def packing(lengths: tuple[int, ...], first: bool) -> Case:
        def on(device: str) -> list[torch.Tensor]:
            x = drawn(len(lengths), max(lengths), 4, dtype=FLOAT, device=device)
            given = x if first else x.transpose(0, 1)
            packed = pack_padded_sequence(given, list(lengths), batch_first=first)
            padded, sizes = nn.utils.rnn.pad_packed_sequence(packed, batch_first=first, padding_value=0.5)
            return with_gradients([packed.data, packed.batch_sizes, padded, sizes], [x])

        return on

    for lengths, first in itertools.product(patterns(3, 3), (True, False)):
        yield f"pack and pad {lengths} batch first {first}", packing(lengths, first)


FAMILIES: dict[str, tuple[Callable[[], Iterator[tuple[str, Case]]], ...]] = {
    "attention": (attentions, attention_modules),
    "recurrent": (recurrents, cells, packings),
    "loss and dropout": (ctc_losses, dropouts),
}


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    content = tensor.detach().cpu().contiguous()
    return (content.dtype, tuple(content.shape), content.reshape(-1).view(torch.uint8).numpy().tobytes())


def outcome(case: Case, device: str) -> list[Any]:
    """What the case gives, or the class and first line of what it raises."""
    torch.manual_seed(0)
    try:
        return [bits(tensor) for tensor in case(device)]
    except Exception as error:  # noqa: BLE001 - the error is what is compared
        return ["raised", type(error).__name__, str(error).splitlines()[0].replace("cuda:0", "cpu")]


def main(family: str) -> None:
    differ, cases, raised = [], 0, 0
    for name, case in itertools.chain.from_iterable(make() for make in FAMILIES[family]):
        on_cpu, on_device = outcome(case, "cpu"), outcome(case, "cuda")
        cases += 1
        raised += on_cpu[:1] == ["raised"]
        if on_cpu != on_device:
            differ.append([name, described(on_cpu, on_device)])
    print("RESULT " + json.dumps({"cases": cases, "raised": raised, "differ": differ}))


def described(expected: list[Any], found: list[Any]) -> str:
    if "raised" in (expected[0], found[0]):
        return " | ".join(str(side[1:]) if side[0] == "raised" else "no error" for side in (expected, found))
    return ", ".join(f"result {i}" for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)


if __name__ == "__main__":
    main(sys.argv[1])
