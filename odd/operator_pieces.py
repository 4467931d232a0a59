"""Pieces of single operators, with gradients and odd layouts."""

from __future__ import annotations

import random

from pieces import Piece, maker

OPERATORS = (
    "F.interpolate(x.view(1, 2, 3, 4), scale_factor=1.5, mode='bicubic')", "F.interpolate(x.view(1, 2, 12), size=5)",
    "F.max_pool2d(x.view(1, 2, 3, 4), 2)", "F.avg_pool1d(x.view(2, 3, 4), 2, padding=1, count_include_pad=False)",
    "F.adaptive_max_pool2d(x.view(1, 2, 3, 4), (2, 3))", "F.unfold(x.view(1, 2, 3, 4), 2)", "F.pad(x.view(2, 3, 4), (1, 2), 'reflect')",
    "torch.einsum('ijk,ikl->ijl', x.view(2, 3, 4), x.view(2, 4, 3))", "torch.cdist(x.view(4, 6), x.view(4, 6))", "torch.renorm(x.view(4, 6).detach(), 2, 0, 1.0)",
    "F.embedding_bag(torch.tensor([0, 2, 1, 0], device=device), x.view(4, 6), torch.tensor([0, 2], device=device), mode='mean')",
    "F.layer_norm(x.view(4, 6), (6,))", "F.group_norm(x.view(2, 4, 3), 2)", "F.instance_norm(x.view(2, 3, 4))", "F.local_response_norm(x.view(1, 4, 6), 2)",
    "F.conv_transpose2d(x.view(1, 2, 3, 4), x.view(2, 3, 2, 2))", "F.conv2d(x.view(1, 2, 3, 4), x[:8].view(2, 1, 2, 2), groups=2, padding='same')",
    "F.conv3d(x.view(1, 1, 2, 3, 4), x[:8].view(1, 1, 2, 2, 2))", "F.pixel_shuffle(x.view(1, 4, 2, 3), 2)", "F.cosine_similarity(x.view(4, 6), x.view(4, 6).roll(1, 0))",
    "torch.linalg.qr(x.view(6, 4))[1]", "torch.linalg.svdvals(x.view(4, 6))", "torch.linalg.pinv(x.view(6, 4))", "torch.linalg.slogdet(x[:16].view(4, 4))[1]",
    "torch.linalg.solve_triangular(x[:16].view(4, 4).tril() + 5 * torch.eye(4, device=device), x[:4].view(4, 1), upper=False)",
    "torch.linalg.cholesky(x[:16].view(4, 4) @ x[:16].view(4, 4).t() + torch.eye(4, device=device))", "torch.linalg.matrix_exp(x[:16].view(4, 4) / 9)",
    "torch.linalg.eigvalsh(x[:16].view(4, 4) + x[:16].view(4, 4).t())", "torch.fft.rfft(x).abs()", "torch.fft.ifft2(x.view(4, 6)).real", "torch.stft(x, 8, return_complex=True, window=torch.ones(8, device=device)).abs()",
    "torch.segment_reduce(x, 'sum', lengths=torch.tensor([4, 12, 8], device=device))", "torch.scatter_reduce(x.view(4, 6), 0, torch.zeros(4, 6, dtype=torch.int64, device=device), x.view(4, 6), 'amax')",
    "torch.index_reduce(x.view(4, 6), 0, torch.tensor([0, 0], device=device), x.view(4, 6)[:2], 'prod')", "torch.special.xlog1py(x, x.abs())", "torch.special.i0e(x)",
    "torch.logcumsumexp(x, 0)", "torch.cumprod(x, 0)", "torch.trapezoid(x)", "torch.polygamma(1, x.abs() + 1)", "torch.igamma(x.abs() + 1, x.abs() + 1)" , "torch.erfinv(x.tanh())",
    "torch.sparse.mm(x.view(4, 6).to_sparse(), x.view(6, 4))", "torch.view_as_complex(x.view(12, 2)).angle()", "torch.polar(x.abs(), x).real", "torch.kron(x[:4].view(2, 2), x[:4].view(2, 2))",
    "torch.baddbmm(x[:8].view(2, 2, 2), x[:8].view(2, 2, 2), x[:8].view(2, 2, 2), alpha=0.5)", "torch.addr(x[:4].view(2, 2), x[:2], x[2:4])", "torch.block_diag(x[:4].view(2, 2), x[:2].view(1, 2))",
    "torch.nanmean(torch.where(x > 0, x, float('nan')))", "torch.nansum(x)", "x.view(4, 6).sort(stable=True, dim=1).values", "x.view(4, 6).topk(2, 1).values", "x.view(4, 6).kthvalue(2, 1).values",
    "x.unfold(0, 4, 2)", "x.view(4, 6).diagonal_scatter(x[:4])", "torch.slice_scatter(x.view(4, 6), x[:6].view(1, 6), 0, 1, 2)", "x.masked_scatter(x > 0, x.flip(0))", "torch.rot90(x.view(4, 6))",
    "F.ctc_loss(x.view(6, 1, 4).log_softmax(2), torch.tensor([[1, 2]], device=device), torch.tensor([6]), torch.tensor([2]))", "F.gaussian_nll_loss(x, x.flip(0), x.abs() + 0.1)",
    "F.triplet_margin_loss(x.view(4, 6), x.view(4, 6).roll(1, 0), x.view(4, 6).roll(2, 0))", "F.cosine_embedding_loss(x.view(4, 6), x.view(4, 6).roll(1, 1), torch.tensor([1, -1, 1, -1], device=device))",
    "F.softmin(x, 0)", "F.hardswish(x)", "F.mish(x)", "F.celu(x)", "F.glu(x)", "F.logsigmoid(x)", "F.prelu(x, x[:1])", "F.softshrink(x)", "F.threshold(x, 0.1, 3.0)", "F.alpha_dropout(x, 0.3, True)",
    "F.feature_alpha_dropout(x.view(2, 3, 4), 0.3, True)", "F.dropout2d(x.view(1, 2, 3, 4), 0.5)", "F.fractional_max_pool2d(x.view(1, 2, 3, 4), 2, output_size=(2, 2), _random_samples=torch.full((1, 2, 2), 0.3, device=device))",
    "F.multi_head_attention_forward(x.view(2, 3, 4), x.view(2, 3, 4), x.view(2, 3, 4), 4, 2, x.repeat(2).view(12, 4), None, None, None, False, 0.0, x[:16].view(4, 4), None)[0]",
    "F.scaled_dot_product_attention(x.view(1, 2, 3, 4), x.view(1, 2, 3, 4), x.view(1, 2, 3, 4), x[:9].view(3, 3) > 0)", "F.affine_grid(x[:6].view(1, 2, 3), (1, 1, 2, 2), align_corners=False)",
    "torch.nn.functional.one_hot((x > 0).long(), 3).float() * x.unsqueeze(1)", "torch.combinations(x[:4])", "torch.cartesian_prod(x[:2], x[2:4])", "torch.gradient(x)[0]", "torch.cov(x.view(4, 6))", "torch.corrcoef(x.view(4, 6))",
    "torch.bucketize(x, x.sort().values).float() * x", "torch.cumulative_trapezoid(x)", "torch.vander(x[:3].detach())", "torch.tensordot(x.view(4, 6), x.view(4, 6), 2)", "torch.linalg.multi_dot([x.view(4, 6), x.view(6, 4), x[:8].view(4, 2)])",
    "torch._foreach_add([x, x * 2], 1.5)[1]", "torch._foreach_norm([x, x * 2])[0]", "torch.chunk(x, 5)[-1]", "torch.tensor_split(x, (3, 9))[1]", "torch.unique_consecutive(x.sign()) * x[0]", "x[:16].view(4, 4).logdet()",
)  # fmt: skip


@maker
def operators(chance: random.Random) -> Piece:
    """Single operators, with gradients and odd layouts; numbers that are not finite now and then."""
    setup = [
        "import torch.nn.functional as F",
        "w = torch.linspace(-2, 2, 24, device=device).requires_grad_()",
    ]
    forms = ("w * 1", "w.flip(0)", "(w * step).sin()", "w.view(4, 6).t().reshape(-1)", "w.repeat_interleave(2)[::2]",
             "torch.where(w > 1.9, w / (step - 2), w)", "w.double()", "w.detach() + w")  # fmt: skip
    step: list[str] = []
    for operator in chance.sample(OPERATORS, chance.randint(2, 6)):
        step += [f"x = {chance.choice(forms)}", "try:", f"    y = {operator}", "    say(step, y)",
                 "    if y.requires_grad: say(step, *torch.autograd.grad(y.sum(), w, allow_unused=True))",
                 "except Exception as error: caught(step, error)"]  # fmt: skip
    step.append("with torch.no_grad(): w.add_(0.01)")
    return Piece("operators", tuple(setup), tuple(step))
