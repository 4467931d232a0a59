"""Attention's operators that CUDA alone has: sequences of several lengths in one tensor, and with a bias."""

import math
import sys
import warnings
from itertools import product

import torch
from torch.nn.attention.varlen import varlen_attn

warnings.filterwarnings("ignore")
HEADS, WIDTH = 4, 16
LENGTHS = ((3, 5), (0, 2), (7, 7), (4, 1))  # of queries, of keys


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: tuple[int, int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence [length, heads, width]; the last query stands at the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("lhd,shd->hls", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    distance = torch.arange(k.shape[0]) - (torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0])
    before, behind = window
    seen = ((distance >= -before) | (before < 0)) & ((distance <= behind) | (behind < 0))
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
    return torch.einsum("hls,shd->lhd", shares, v)


def close(ours: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert ours.is_cuda and ours.shape == wanted.shape, (ours.shape, wanted.shape)
    torch.testing.assert_close(ours.cpu().float(), wanted.float(), rtol=tolerance, atol=tolerance)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


torch.manual_seed(1)
ends_q, ends_k = (torch.tensor([0, *(pair[i] for pair in LENGTHS)]).cumsum(0) for i in (0, 1))
for dtype, window, key_heads in product(
    (torch.float16, torch.bfloat16), ((-1, -1), (-1, 0), (2, 1)), (HEADS, 1)
):
    q = draw(int(ends_q[-1]), HEADS, WIDTH, dtype=dtype)
    k, v = (draw(int(ends_k[-1]), key_heads, WIDTH, dtype=dtype) for _ in range(2))
    parts = [
        by_hand(q[a:b].float(), k[c:d].float(), v[c:d].float(), window)
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
    ]
    wanted = torch.cat(parts)
    mine = [t.detach().cuda().requires_grad_() for t in (q, k, v)]
    got = varlen_attn(
        *mine,
        ends_q.int().cuda(),
        ends_k.int().cuda(),
        7,
        7,
        window_size=window,
        enable_gqa=key_heads != HEADS,
    )
    close(got, wanted, 2e-2)
    given = torch.randn_like(wanted)
    for ours, exact in zip(
        torch.autograd.grad(got, mine, given.to(dtype).cuda()),
        torch.autograd.grad(wanted, (q, k, v), given),
        strict=True,
    ):
        close(ours, exact, 4e-2)

for mask_type, with_bias in product((0, 2), (False, True)):
    q, k, v = (draw(2, length, HEADS, WIDTH, dtype=torch.float32) for length in (5, 6, 6))
    bias = torch.randn(2, HEADS, 5, 6, requires_grad=True) if with_bias else None
    parts = [
        by_hand(q[i], k[i], v[i], (-1, 0) if mask_type else (-1, -1), None if bias is None else bias[i])
        for i in range(2)
    ]
    wanted = torch.stack(parts)
    leaves = [t for t in (q, k, v, bias) if t is not None]
    mine = [t.detach().cuda().requires_grad_() for t in leaves]
    got, sums, *_ = torch.ops.aten._efficient_attention_forward(
        *mine[:3], mine[3] if with_bias else None, None, None, None, None, 0.0, mask_type, True
    )
    assert sums.shape == (2, HEADS, 32)
    close(got, wanted, 1e-4)
    given = torch.randn_like(wanted)
    for ours, exact in zip(
        torch.autograd.grad(got, mine, given.cuda()), torch.autograd.grad(wanted, leaves, given), strict=True
    ):
        close(ours, exact, 1e-4)


def lengths_told(length: int) -> tuple[int, int]:
    *_, longest_query, longest_key = torch.ops.aten._efficient_attention_forward(
        *(draw(2, n, HEADS, WIDTH, dtype=torch.float32).cuda() for n in (length, 7, 7)),
        *(None,) * 5, 0.0, 0, False,
    )  # fmt: skip
    return longest_query, longest_key


if client := sys.modules.get("understudy.proxy_client._client"):  # with UNDERSTUDY_STATISTICS=1
    assert [lengths_told(length) for length in (5, 6)] == [(5, 7), (6, 7)]
    before = client.statistics()
    assert [lengths_told(length) for length in (6, 5, 5)] == [(6, 7), (5, 7), (5, 7)]
    after = client.statistics()
    assert before["synchronous"] == after["synchronous"] > 0

try:
    torch.ops.aten._efficient_attention_forward(
        *(t.detach().cuda() for t in (q, k, v)), None, None, None, None, None, 0.5, 0, False
    )
    torch.cuda.synchronize()
except NotImplementedError as error:
    assert "virtual device" in str(error)
    sys.stdout.write("right\n")
