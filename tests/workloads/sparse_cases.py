"""Sparse tensors in small programs, run on `cuda` and on the CPU; writes what differs, as JSON, to argv[1].

A case gets a device and returns tensors (in lists and tuples as it likes), numbers or strings. Tensors are
compared by layout, shape, strides, element type and bits; sparse ones piece by piece.
"""

import io
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Case = Callable[[str], Any]
CASES: dict[str, Case] = {}
BLOCKED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
BLOCKED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def facts(value: Any) -> list[Any]:
    """What two runs must agree on."""
    if isinstance(value, (tuple, list)):
        return [fact for item in value for fact in facts(item)]
    if not isinstance(value, torch.Tensor):
        return [value]
    tensor = value.detach()
    if tensor.layout == torch.sparse_coo:
        head = ["coo", tuple(tensor.shape), tensor.is_coalesced(), tensor.sparse_dim(), tensor.dense_dim()]
        return [*head, *facts([tensor._indices(), tensor._values()])]
    if tensor.layout in BLOCKED_ROWS:
        pieces = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        return [str(tensor.layout), tuple(tensor.shape), *facts(pieces)]
    if tensor.layout in BLOCKED_COLUMNS:
        pieces = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        return [str(tensor.layout), tuple(tensor.shape), *facts(pieces)]
    if tensor.is_nested:
        return ["nested", *facts(list(tensor.unbind()))]
    bits = tensor.cpu().contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []
    return [str(tensor.dtype), tuple(tensor.shape), tensor.stride(), bits]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sparse(device: str, *, coalesced: bool = False, dense_size: int = 0) -> torch.Tensor:
    """A 4x3 matrix with duplicate entries, of numbers or of vectors."""
    indices = torch.tensor([[0, 3, 3, 1, 0, 2], [2, 1, 1, 0, 2, 2]])
    tail = (dense_size,) if dense_size else ()
    values = random(6, *tail)
    made = torch.sparse_coo_tensor(indices.to(device), values.to(device), (4, 3, *tail), device=device)
    return made.coalesce() if coalesced else made


def rows(device: str) -> torch.Tensor:
    return random(4, 6).relu().to(device)


@case
def constructors(device: str) -> Any:
    made = sparse(device)
    if (made.device.type, made.layout, made.is_sparse) != (device, torch.sparse_coo, True):
        raise SystemExit(f"a sparse tensor on {device} says it is {made.layout} on {made.device}")
    if made.is_cuda != (device == "cuda"):
        raise SystemExit("is_cuda is wrong")
    return [
        made,
        torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=device),
        torch.sparse_coo_tensor((2, 3), device=device),
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), device=device),
        torch.sparse_coo_tensor(torch.ones(2, 0, dtype=torch.long), torch.ones(0), (2, 2), device=device),
        made._nnz(),
        made.sparse_dim(),
        sparse(device, dense_size=2),
    ]


@case
def conversions(device: str) -> Any:
    x = rows(device)
    vectors = sparse(device, coalesced=True, dense_size=2)
    return [
        sparse(device).coalesce(),
        sparse(device).to_dense(),
        vectors.to_dense(),
        x.to_sparse(),
        x.to_sparse(1),
        x.to_sparse().indices(),
        x.to_sparse().values(),
        torch.zeros(2, 2, device=device).to_sparse(),
        x.double().to_sparse().float(),
    ]


@case
def arithmetic(device: str) -> Any:
    a, b = sparse(device), sparse(device, coalesced=True)
    wide, ones = torch.ones(4, 2, device=device), torch.ones(3, 2, device=device)
    return [
        [a + b, a - b, a * b, a * 2, a * torch.tensor(3.0), b / 3, -a, a.abs(), b.sqrt(), b.pow(2)],
        [torch.ones(4, 3, device=device) + a, a.sum(), torch.sparse.sum(a, 0), a.norm()],
        [a.t(), a.transpose(0, 1), a.unsqueeze(0), a.narrow_copy(0, 1, 2), b.select(0, 1)],
        [torch.cat([a, b]), torch.stack([a, b]), b.index_select(0, torch.tensor([1, 3], device=device))],
        [torch.sparse.mm(a, ones), torch.sparse.mm(a, b.t()), a @ torch.ones(3, device=device)],
        [torch.sparse.addmm(wide, a, ones), torch.addmm(wide, a, ones), torch.sparse.softmax(b, 1)],
        [torch.rand(4, 3, generator=torch.Generator().manual_seed(4)).to(device).sparse_mask(b)],
    ]


@case
def in_place_changes_reach_the_tensor_and_its_aliases(device: str) -> Any:
    results = []
    a = sparse(device)
    values = a._values()
    a.mul_(2)
    results += [a.clone(), values.clone()]
    a.add_(sparse(device, coalesced=True))
    results.append(a.clone())
    a.zero_()
    dense = torch.ones(4, 3, device=device)
    dense.add_(sparse(device), alpha=-0.5)
    negated = sparse(device, coalesced=True).neg_()
    copied = sparse(device).copy_(negated)
    subtracted = sparse(device).sub_(negated)
    divided = subtracted.clone().div_(3)
    out = sparse(device)
    torch.add(sparse(device), negated, out=out)
    dense_out = torch.empty(0, device=device)
    torch.mm(sparse(device), torch.ones(3, 2, device=device), out=dense_out)
    return [*results, a, dense, negated, copied, subtracted, divided, out, dense_out]


@case
def transfers_and_copies(device: str) -> Any:
    # Cloned, because .to("cpu") of a tensor on the CPU is itself, with strides that no copy would have.
    a, b = sparse("cpu").to(device), sparse("cpu", coalesced=True).clone().to(device)
    c = rows("cpu").to_sparse_csr().to(device)
    empty = torch.empty_like(a)
    return [
        [a, b, a.cpu(), c, c.cpu(), c.double(), c.clone(), c.detach()],
        [a.double(), a.half(), a.clone(), a.detach(), torch.zeros_like(a), empty.shape, a.to(device) is a],
    ]


@case
def save_and_load(device: str) -> Any:
    file = io.BytesIO()
    torch.save([sparse(device), sparse(device, coalesced=True), rows(device).to_sparse_csr()], file)
    file.seek(0)
    there = torch.load(file)
    file.seek(0)
    here = torch.load(file, map_location="cpu")
    if {t.device.type for t in there} != {device} or {t.device.type for t in here} != {"cpu"}:
        raise SystemExit("tensors were loaded to another device")
    return [there, here]


@case
def autograd(device: str) -> Any:
    x, a = random(3, 2).to(device).requires_grad_(), sparse(device).requires_grad_()
    torch.sparse.mm(a, x).square().sum().backward()
    v = random(3).to(device).requires_grad_()
    made = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1]], device=device), v, (3,))
    made.to_dense().pow(2).sum().backward()
    z = random(3, 3).to(device).requires_grad_()
    z.to_sparse().coalesce().values().sum().backward()
    s = rows(device).to_sparse_csr().requires_grad_()
    w = random(6, 2, seed=2).to(device).requires_grad_()
    torch.sparse.mm(s, w).sin().sum().backward()
    return [x.grad, a.grad, v.grad, z.grad, s.grad, w.grad]


@case
def compressed(device: str) -> Any:
    x = rows(device)
    made = torch.sparse_csr_tensor(
        torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), torch.tensor([1.0, 2.0, 3.0]), (2, 2), device=device
    )
    if made.device.type != device:
        raise SystemExit(f"a CSR tensor is on {made.device}")
    layouts = [x.to_sparse_csr(), x.to_sparse_csc(), x.to_sparse_bsr((2, 2)), x.to_sparse_bsc((2, 2))]
    results: list[Any] = [layouts, [t.to_dense() for t in layouts], [t.clone() for t in layouts]]
    scaled = x.to_sparse_csr()
    scaled.mul_(2)
    results += [made, made * 2, made + made, made.abs(), made.sum(), made.crow_indices(), scaled]
    results += [x.to_sparse_csr() @ x.t(), x.to_sparse_csr().to_sparse(), sparse(device).to_sparse_csr()]
    results += [torch.empty_like(made).shape, torch.sparse.mm(made, torch.ones(2, 3, device=device))]
    return results


@case
def products_with_reductions(device: str) -> Any:
    results: list[Any] = []
    for reduce in ("sum", "mean", "amax", "amin"):
        a = rows(device).to_sparse_csr().requires_grad_()
        b = random(6, 2, seed=2).to(device).requires_grad_()
        out = torch.sparse.mm(a, b, reduce)
        out.sin().sum().backward()
        results += [out, a.grad, b.grad]
    return results


@case
def nested(device: str) -> Any:
    parts = [random(3, 4), random(5, 4), random(1, 4)]
    made = torch.nested.nested_tensor(parts, device=device, requires_grad=True)
    if (made.device.type, made.layout) != (device, torch.strided):
        raise SystemExit(f"a nested tensor on {device} says it is {made.layout} on {made.device}")
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 3)
    linear.to(device)
    out = torch.nn.functional.gelu(linear(made))
    out.to_padded_tensor(0.0).sum().backward()
    plain = made.detach()
    changed = plain.clone().mul_(3.0)
    return [
        [made, out, made.grad, linear.weight.grad, changed, plain * 2, plain + changed, -plain],
        [plain.to_padded_tensor(1.0), list(plain.unbind()), plain[1], plain.transpose(1, 2), plain.size(2)],
        [torch.nn.functional.softmax(plain, -1), torch.matmul(plain, plain.transpose(1, 2)), plain.cpu()],
        [torch.nested.nested_tensor(parts).to(device), plain.double(), plain.numel()],
        [plain.sum(-1, keepdim=True)],
    ]


@case
def text(device: str) -> Any:
    shown = [repr(sparse(device)), repr(rows(device).to_sparse_csr())]
    return [" ".join(t.replace("device='cuda:0', ", "").split()) for t in shown]


@case
def errors(device: str) -> Any:
    attempts: list[Callable[[], Any]] = [
        lambda: torch.sparse_coo_tensor([[0, 9]], [1.0, 2.0], (2,), device=device, check_invariants=True),
        lambda: torch.sparse_csr_tensor(
            [0, 2, 1], [0, 1, 1], [1.0, 2.0, 3.0], (2, 2), device=device, check_invariants=True
        ),
        lambda: sparse(device).values(),
        lambda: torch.exp(sparse(device)),
        lambda: sparse(device).add(sparse(device, dense_size=2)),
        lambda: sparse(device).copy_(torch.ones(4, 3, device=device)),
        lambda: sparse(device).view(12),
        lambda: sparse(device).stride(),
    ]
    outcomes = []
    for attempt in attempts:
        try:
            attempt()
            outcomes.append("nothing was raised")
        except Exception as error:  # noqa: BLE001 - whatever it is, both devices must raise it
            outcomes.append(f"{type(error).__name__}: {str(error)[:60]}")
    return outcomes


def train(device: str, module: torch.nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 2)
    module.to(device)
    head.to(device)
    sparse_optimizer = make(list(module.parameters()))
    dense_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    results = []
    for step in range(5):
        words = torch.randint(0, 20, (6, 3 + step), generator=generator).to(device)
        found = module(words)
        loss = head(found.mean(1) if found.dim() == 3 else found).square().sum()
        loss.backward()
        gradient = next(module.parameters()).grad
        if gradient is None or not gradient.is_sparse:
            raise SystemExit("the gradient is not sparse")
        results += [loss.detach(), gradient.clone()]
        sparse_optimizer.step()
        dense_optimizer.step()
        sparse_optimizer.zero_grad(set_to_none=step % 2 == 0)
        dense_optimizer.zero_grad()
    return [results, list(module.parameters())]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def training_case(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(20, 4, sparse=True)
        bags = [torch.nn.EmbeddingBag(20, 4, sparse=True, mode=mode) for mode in ("mean", "sum")]
        return [train(device, module, make) for module in (embedding, *bags)]

    CASES[f"embeddings_trained_with_{name}"] = run


for optimizer_name, optimizer in OPTIMIZERS.items():
    training_case(optimizer_name, optimizer)


@case
def accumulated_gradients(device: str) -> Any:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(20, 4, sparse=True).to(device)
    for seed in (1, 2):
        words = torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(seed)).to(device)
        embedding(words).sin().sum().backward()
    return [embedding.weight.grad]


@case
def jagged(device: str) -> Any:
    nested = torch.nested.nested_tensor([random(3, 2), random(5, 2)], layout=torch.jagged, device=device)
    nested.requires_grad_()
    (nested * 2).sin().values().sum().backward()
    padded = torch.nested.to_padded_tensor(nested.detach(), 0.0)
    return [
        list((nested * 2).unbind()),
        padded,
        list(nested.grad.unbind()) if nested.grad is not None else [],
    ]


def compare(function: Case) -> str | None:
    """What differs between the devices, or None."""
    try:
        expected = facts(function("cpu"))
        got = facts(function("cuda"))
    except Exception:  # noqa: BLE001 - reported as this case's difference
        return traceback.format_exc()
    if got == expected:
        return None
    differing = [(i, a, b) for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b]
    return f"{len(expected)} facts on the CPU, {len(got)} on cuda; differing: {differing[:5]}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).write_text(json.dumps({name: compare(function) for name, function in CASES.items()}))
