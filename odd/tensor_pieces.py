"""Pieces about tensors: what they hold, whose memory it is, where randomness comes from, and how they fail."""

from __future__ import annotations

import random

from pieces import Piece, maker

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64")


def _values(dtype: str, shape: str) -> str:
    """Source of a tensor that is the same in every run."""
    if dtype == "bool":
        return f"(torch.arange({shape}.numel(), device=device).reshape({shape}) % 3 == 0)"
    base = f"((torch.arange({shape}.numel(), device=device) * 37 + 11 * rank) % 19 - 9).reshape({shape})"
    return f"({base} / 7).to(torch.{dtype})" if dtype[0] in "fbc" else f"{base}.to(torch.{dtype})"


def _size(chance: random.Random, most: int = 7, dims: int = 3) -> str:
    numbers = [str(chance.randint(1, most)) for _ in range(chance.randint(1, dims))]
    return f"torch.Size(({', '.join(numbers)},))"


CHANGES = (
    "t.add_(1)", "t.mul_(3)", "t[0] = t[-1]", "t = t.clone()", "t.copy_(t.flip(0))", "t = t.roll(1, 0)",
    "t.view(-1)[::2].zero_()", "t.t_() if t.dim() == 2 else None", "t = t.contiguous()", "t = t.detach()",
    "t.data = t.data * 2", "t = torch.cat([t, t[:1]])[: t.shape[0]]", "t = t.sort(0).values",
    "t = torch.where(t == t, t, torch.zeros_like(t))", "t.masked_fill_(t.reshape(-1)[0] == t, 1)",
    "t = t.cumsum(0).to(t.dtype)", "t.index_add_(0, torch.zeros(1, dtype=torch.int64, device=device), t[:1])",
    "t.index_copy_(0, torch.zeros(1, dtype=torch.int64, device=device), t[-1:])",
    "t.scatter_(0, torch.zeros_like(t, dtype=torch.int64)[:1], t[-1:])",
    "t = t.expand(2, *t.shape)[1]", "t = t.as_strided(t.shape, t.stride())", "t = t.unsqueeze(0).squeeze(0)",
    "t = t.transpose(0, -1).contiguous().transpose(0, -1)", "t.resize_(t.shape)", "t = t.new_zeros(t.shape).add_(t)",
    "t = torch.stack([t, t]).sum(0).to(t.dtype)", "t = t.to(torch.float64).to(t.dtype)", "t = t.to('cpu', copy=True).to(device)",
    "t = torch.from_numpy(t.cpu().clone().numpy()).to(device)", "t = torch.tensor(t.tolist(), dtype=t.dtype, device=device)",
    "t = t.narrow(0, 0, t.shape[0])", "t = t.unbind(0)[0].expand_as(t).clone()", "t.set_(t.clone())",
    "t.untyped_storage().copy_(t.clone().untyped_storage())", "t.fill_(step)", "t.sub_(t.min())",
    "t = torch.empty_like(t).copy_(t, non_blocking=True)", "t = copy.deepcopy(t)", "t.swapaxes_(0, -1)",
    "t.pow_(2)", "t = t.clamp(-100, 100)", "t = t.diff(dim=0, prepend=t[:1])", "t.remainder_(5)", "t.neg_()",
    "t = t.nan_to_num()", "t = torch.tril(t) if t.dim() > 1 else t", "t = t.repeat_interleave(2, 0)[::2]",
    "t = t.gather(0, torch.zeros_like(t, dtype=torch.int64))", "t.sigmoid_()", "t.exp_()", "t.div_(0)", "t.sqrt_()",
    "t.random_(0, 5)", "t.bernoulli_(0.5)", "t.normal_()", "t.uniform_()", "t.exponential_()", "t.cauchy_()",
    "t.log_normal_()", "t.geometric_(0.5)", "t = torch.randint_like(t, 0, 9)", "t = torch.rand_like(t)",
    "t.put_(torch.tensor([0], device=device), t.reshape(-1)[-1:])", "t.fill_diagonal_(3)", "t.erfinv_()",
    "t.addcmul_(t, t, value=2)", "t.lerp_(t * 2, 0.5)", "t.clamp_min_(0)", "t.round_()", "t.sign_()",
    "t.dtype == torch.bool or t.abs_()",  # of truth values on CUDA only
    "t.bitwise_xor_(t)", "t.logical_not_()", "t ^= 1", "t <<= 1", "t //= 2", "t @= t",
)  # fmt: skip
LOOKS = (
    "t", "t.sum()", "t.reshape(-1)[0].item()", "t.max()", "t.argmax().item()", "t.any().item()", "t.unique()",
    "t.nonzero()", "t.shape", "t.stride()", "t.is_contiguous()", "t.mean()", "t.float().std()", "t.tolist()",
    "(t != 0).sum().item()", "torch.equal(t, t)", "t.isnan().any().item()", "t.topk(1, 0).values", "t.median()",
    "t.float().histc(5)", "t.bincount()", "t.mode(0).values", "t.kthvalue(1, 0).values", "bool(t.reshape(-1)[0])",
    "t.storage_offset()", "t.untyped_storage().nbytes()", "t.dtype", "t.element_size()", "t.data_ptr() != 0",
    "t.norm()", "t.prod()", "t.logcumsumexp(0)", "t.quantile(0.5)", "t.cummax(0).indices", "torch.stack(torch.var_mean(t))",
    "str(t.cpu())", "repr(t.dtype)", "format(t.reshape(-1)[0].item())", "hash(t) == hash(t)", "t.cpu().clone().numpy().sum()",
    "t[t > 0]", "t.masked_select(t != t[0])", "torch.bucketize(t, t.reshape(-1).sort().values)", "len(t)",
    "torch.linalg.matrix_rank(t)", "torch.linalg.svdvals(t)", "torch.linalg.det(t)", "torch.fft.fft(t.float())",
    "t.argsort(0)", "t.frexp().exponent", "t.to_sparse().coalesce().indices()", "t.isfinite().all().item()",
)  # fmt: skip


@maker
def tensor(chance: random.Random) -> Piece:
    """One tensor through changes, views of views, and reads; exceptions are part of what is compared."""
    dtype = chance.choice(DTYPES)
    setup = ["import copy", f"t = {_values(dtype, _size(chance))}"]
    step: list[str] = []
    for _ in range(chance.randint(2, 8)):
        change = chance.choice(CHANGES)
        if chance.random() < 0.3:
            step.append(f"if step % {chance.randint(2, 4)} == {chance.randint(0, 1)}:")
            change = f"    {change}"
        step.append(change)
        if chance.random() < 0.4:
            step.append(f"say(step, {chance.choice(LOOKS)})")
    step.append(f"say(step, {chance.choice(LOOKS)}, t)")
    return Piece("tensor", tuple(setup), tuple(step), ("say('final', t)",))


@maker
def views(chance: random.Random) -> Piece:
    """Several tensors of one storage, changed through each; the storage is resized or replaced meanwhile."""
    rows = chance.randint(2, 5)
    setup = [f"base = torch.arange({rows * 6}, device=device, dtype=torch.{chance.choice(DTYPES[:8])})",
             f"grid = base.view({rows}, 6)"]  # fmt: skip
    names = ["base", "grid"]
    sources = ("{0}.view(-1)", "{0}[1:]", "{0}[::2]", "{0}.unsqueeze(-1)", "{0}.detach()", "{0}.flatten()[2:9]",
               "{0}.as_strided((2, 2), (2, 1), 1)", "{0}.data", "{0}.t() if {0}.dim() < 3 else {0}",
               "{0}.diagonal() if {0}.dim() == 2 else {0}", "{0}.unfold(0, 2, 1)", "{0}.view(torch.uint8)")  # fmt: skip
    for number in range(chance.randint(1, 4)):
        setup.append(f"v{number} = {chance.choice(sources).format(chance.choice(names))}")
        names.append(f"v{number}")
    changes = ("{0}.add_(1)", "{0}.mul_(2)", "{0}.zero_()", "{0}.copy_({0}.clone())", "{0}.fill_(step)",
               "{0}[..., 0] = step", "{0}.neg_()", "{0}.set_({0}.clone())", "{0}.data = {0}.clone()",
               "{0}.random_(0, 3)", "{0}.clamp_(0, 3)", "{0}.untyped_storage().resize_({0}.untyped_storage().nbytes())",
               "{0}.resize_({0}.numel() + 1).zero_()", "{0}.untyped_storage().fill_(3)")  # fmt: skip
    step = [chance.choice(changes).format(chance.choice(names)) for _ in range(chance.randint(2, 5))]
    step.append(f"say(step, {', '.join(chance.sample(names, min(3, len(names))))})")
    return Piece("views", tuple(setup), tuple(step), (f"say('final', {', '.join(names)})",))


@maker
def generators(chance: random.Random) -> Piece:
    """Seeds and states of generators, set, kept and set again; distributions."""
    setup = ["own = torch.Generator(device)", f"own.manual_seed({chance.randint(0, 99)})",
             "kept = torch.cuda.get_rng_state() if on_device else torch.get_rng_state()"]  # fmt: skip
    set_state = "(torch.cuda.set_rng_state if on_device else torch.set_rng_state)(kept)"
    forms = (
        "say(step, torch.rand(3, device=device))", "say(step, torch.randn(2, 3, device=device, generator=own))",
        f"torch.manual_seed(step * {chance.randint(1, 9)})", "own.manual_seed(step)", set_state,
        "say(step, torch.randperm(9, device=device))", "say(step, torch.randperm(5, device=device, generator=own))",
        "say(step, torch.multinomial(torch.ones(6, device=device), 4))",
        "say(step, torch.nn.functional.dropout(torch.ones(9, device=device), 0.4))",
        "say(step, torch.bernoulli(torch.full((7,), 0.3, device=device), generator=own))",
        "state = own.get_state(); torch.rand(2, device=device, generator=own); own.set_state(state)",
        "say(step, own.initial_seed())", "say(step, torch.poisson(torch.full((4,), 3.0, device=device)))",
        "say(step, torch.normal(0.0, 1.0, (3,), device=device, generator=own))",
        "say(step, torch.distributions.Normal(torch.zeros(2, device=device), 1.0).sample())",
        "say(step, torch.distributions.Categorical(torch.ones(5, device=device)).sample((3,)))",
        "say(step, torch.distributions.Gamma(torch.ones(2, device=device), 1.0).sample())",
        "say(step, torch.distributions.Dirichlet(torch.ones(3, device=device)).rsample())",
        "say(step, torch.nn.functional.gumbel_softmax(torch.zeros(4, device=device)))",
        "say(step, torch.empty(5, device=device).trunc_normal_() if hasattr(torch.Tensor, 'trunc_normal_') else 0)",
        "say(step, torch.nn.init.kaiming_uniform_(torch.empty(3, 3, device=device)))",
        "say(step, torch.nn.functional.rrelu(torch.randn(5, device=device), training=True))",
    )  # fmt: skip
    return Piece("generators", tuple(setup), tuple(chance.sample(forms, chance.randint(2, 6))))


@maker
def errors(chance: random.Random) -> Piece:
    """What raises is caught, by its class, and the program goes on."""
    forms = (
        "torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)",
        "torch.linalg.cholesky(-torch.eye(3, device=device) * (step % 2))",
        "torch.linalg.inv(torch.zeros(2, 2, device=device))",
        "torch.linalg.solve(torch.zeros(2, 2, device=device), torch.ones(2, device=device))",
        "torch.ones(3, device=device)[5]", "torch.ones(3, device=device).view(2, 2)",
        "torch.histc(torch.tensor([float('nan')], device=device))",
        "torch.cat([torch.ones(2, device=device), torch.ones(2, 2, device=device)])",
        "torch.nn.functional.embedding(torch.tensor([9], device=device), torch.ones(3, 2, device=device))",
        "torch.ones(3, device=device).index_select(0, torch.tensor([4], device=device))",
        "torch.multinomial(torch.zeros(3, device=device), 1)", "torch.ones(3, device=device).item()",
        "torch.bincount(torch.tensor([-1], device=device))", "torch.ones(2, device=device).int().pow(-1)",
        "torch.ones(2, requires_grad=True, device=device).add_(1)", "torch.ones(2, device=device).sum().backward()",
        "int(torch.tensor(float('nan'), device=device))", "torch.nonexistent(1)", "1 // 0",
        "torch.ones(2, device=device) + torch.ones(3, device=device)", "torch.zeros(-1, device=device)",
        "torch.ones(2, dtype=torch.int64, device=device).mean()", "torch.linalg.eigh(torch.full((2, 2), float('inf'), device=device))",
        "torch.linalg.svd(torch.full((2, 2), float('nan'), device=device))", "torch.randint(5, 2, (3,), device=device)",
        "torch.ones(4, device=device).expand(3)", "bool(torch.ones(2, device=device))",
        "torch.nn.functional.nll_loss(torch.ones(2, 3, device=device), torch.tensor([0, 7], device=device))",
        "torch.nn.functional.conv2d(torch.ones(1, 1, 2, 2, device=device), torch.ones(1, 1, 3, 3, device=device))",
        "torch.ones(2, device=device).scatter_(0, torch.tensor([5], device=device), 1.0)",
        "torch.linalg.lstsq(torch.full((2, 2), float('nan'), device=device), torch.ones(2, 1, device=device))",
        "torch.bernoulli(torch.full((2,), 2.0, device=device))", "torch.ones(3, device=device).unflatten(0, (2, 2))",
        "torch.lu_unpack(*torch.linalg.lu_factor(torch.ones(2, 2, device=device)), unpack_pivots=7)",
        "torch.nn.functional.ctc_loss(torch.randn(3, 1, 4, device=device).log_softmax(2), "
        "torch.tensor([[9]], device=device), torch.tensor([3]), torch.tensor([1]))",
        "torch.ones(2, device=device).half().inverse()", "torch.combinations(torch.ones(2, 2, device=device))",
        "torch.nn.Linear(2, 2, device=device)(torch.ones(2, 3, device=device))",
        "torch.as_strided(torch.ones(2, device=device), (9,), (9,))", "torch.take(torch.ones(2, device=device), torch.tensor([3], device=device))",
    )  # fmt: skip
    step: list[str] = []
    for form in chance.sample(forms, chance.randint(1, 5)):
        step += ["try:", f"    {form}", "    say(step, 'no error')", "except Exception as error:",
                 "    caught(step, error)"]  # fmt: skip
    step.append("say(step, torch.full((2,), step, device=device))")
    return Piece("errors", (), tuple(step))


@maker
def gradients(chance: random.Random) -> Piece:
    """Autograd's less trodden paths: functions of one's own, hooks, higher orders, checkpoints, forward mode."""
    setup = ["import torch.utils.checkpoint", "w = torch.linspace(-1, 1, 6, device=device).requires_grad_()",
             "class Twice(torch.autograd.Function):", "    @staticmethod", "    def forward(ctx, x):",
             "        ctx.save_for_backward(x)", "        return x * 2", "    @staticmethod",
             "    def backward(ctx, grad):", "        (x,) = ctx.saved_tensors", "        return grad * 2 + x * 0",
             "def fails(grad): raise ValueError('in a hook')"]  # fmt: skip
    forms = (
        ["y = Twice.apply(w * step)", "say(step, *torch.autograd.grad(y.sum(), w))"],
        ["(g,) = torch.autograd.grad((w ** 3).sum(), w, create_graph=True)", "say(step, *torch.autograd.grad(g.sum(), w))"],
        ["y = torch.utils.checkpoint.checkpoint(lambda x: torch.dropout(x.sin(), 0.5, True), w, use_reentrant=False)",
         "say(step, y, *torch.autograd.grad(y.sum(), w))"],
        ["say(step, torch.func.jacrev(lambda x: x.sin() * x[0])(w.detach()))"],
        ["say(step, torch.func.hessian(lambda x: (x ** 3).sum())(w.detach()))"],
        ["say(step, torch.func.vmap(lambda x: x.sum() * x)(w.detach().view(2, 3)))"],
        ["say(step, *torch.func.jvp(lambda x: x.exp(), (w.detach(),), (torch.ones_like(w),)))"],
        ["y = (w * w).sum()", "y.backward(retain_graph=True)", "y.backward()", "say(step, w.grad)", "w.grad = None"],
        ["handle = w.register_hook(lambda grad: grad * 3)", "say(step, *torch.autograd.grad((w * w).sum(), w))",
         "handle.remove()"],
        ["y = w * 2", "y.register_hook(fails)", "try: y.sum().backward()", "except ValueError: say(step, 'failed')",
         "say(step, w.grad)", "w.grad = None"],
        ["with torch.autograd.detect_anomaly(check_nan=True):", "    try: (w * float('nan')).sqrt().sum().backward()",
         "    except RuntimeError: say(step, 'anomaly')", "w.grad = None"],
        ["with torch.no_grad(): w -= 0.01 * step", "say(step, w)"],
        ["with torch.autograd.graph.save_on_cpu():", "    y = (w.sin() * w).sum()", "say(step, *torch.autograd.grad(y, w))"],
        ["with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1, lambda x: x):", "    y = (w.exp() * w).sum()",
         "say(step, *torch.autograd.grad(y, w))"],
        ["a = w.detach().clone().requires_grad_()", "b = a.view(2, 3)[0]", "c = a.clone()", "c[1:3].mul_(b[:2])",
         "c.sum().backward()", "say(step, a.grad)"],
        ["say(step, torch.autograd.functional.hvp(lambda x: (x ** 3).sum(), w.detach(), torch.ones_like(w))[1])"],
        ["y = torch.nn.functional.grid_sample(w.view(1, 1, 2, 3), torch.zeros(1, 2, 2, 2, device=device), align_corners=False)",
         "say(step, *torch.autograd.grad(y.sum(), w))"],
        ["y = torch.nn.functional.scaled_dot_product_attention(w.view(1, 1, 3, 2), w.view(1, 1, 3, 2), w.view(1, 1, 3, 2), "
         "is_causal=step % 2 == 0)", "say(step, *torch.autograd.grad(y.sum(), w))"],
    )  # fmt: skip
    step = [line for form in chance.sample(forms, chance.randint(1, 4)) for line in form]
    return Piece("gradients", tuple(setup), tuple(step), ("say('final', w)",))


@maker
def settings(chance: random.Random) -> Piece:
    """Global settings that change what a kernel computes, changed in mid-run, by whatever thread, and back."""
    forms = (
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
        ("torch.set_num_threads(2)", "torch.set_num_threads(1)"),
        ("torch.set_flush_denormal(True)", "torch.set_flush_denormal(False)"),
        ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)"),
        ("torch.set_float32_matmul_precision('medium')", "torch.set_float32_matmul_precision('highest')"),
        ("torch.backends.mkldnn.set_flags(False)", "torch.backends.mkldnn.set_flags(True)"),
        ("torch.backends.cuda.enable_mem_efficient_sdp(False)", "torch.backends.cuda.enable_mem_efficient_sdp(True)"),
        ("torch.backends.cuda.enable_flash_sdp(False)", "torch.backends.cuda.enable_flash_sdp(True)"),
        ("torch.utils.deterministic.fill_uninitialized_memory = False",
         "torch.utils.deterministic.fill_uninitialized_memory = True"),
        ("torch.autograd.set_detect_anomaly(True)", "torch.autograd.set_detect_anomaly(False)"),
        ("torch.sparse.check_sparse_tensor_invariants.enable()", "torch.sparse.check_sparse_tensor_invariants.disable()"),
    )  # fmt: skip
    on, off = chance.choice(forms)
    first = chance.randint(2, 5)
    last = first + chance.randint(1, 4)
    step = [f"if step == {first}: {on}", f"if step == {last}: {off}",
            "tiny = torch.full((3,), 1e-39, device=device) * torch.tensor(0.5, device=device)",
            "x = torch.arange(600.0, device=device).reshape(20, 30).sin()",
            "say(step, tiny, torch.ones(2, device=device) / 3, x @ x.t(), x.sum(), x.softmax(-1))",
            "q = x.reshape(1, 2, 10, 30)", "say(step, torch.nn.functional.scaled_dot_product_attention(q, q, q))",
            "say(step, torch.nn.functional.conv1d(x.unsqueeze(0), x[:4].reshape(1, 20, 6)))"]  # fmt: skip
    return Piece("settings", (), tuple(step), (off,))
