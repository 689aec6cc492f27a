r"""The oracle: obviously correct and slow.

One ``autograd.grad`` call per example on a batch of one, dense float64 algebra, hash functions in
Python integers. Nothing here calls the library; only its recipe objects are read.
"""

import copy
import hashlib
import itertools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import holdfast as hf

PRIME = 2**31 - 1
PURPOSES = {
    "sketch": 0,
    "labels": 1,
    "slices": 2,
    "groups": 3,
    "parts": 5,
    "entries": 6,
    "test_matrix": 7,
}
Loss = Callable[[Tensor, tuple[Tensor, ...]], Tensor]  # (outputs, batch of one) -> scalar


def generator(seed: int, task: int, purpose: str, copy_: int = 0) -> np.random.Generator:
    """The documented stream of (seed, task, rank 0, copy, purpose)."""
    key = (seed, task, 0, copy_, PURPOSES[purpose])
    return np.random.default_rng(np.random.SeedSequence(key))


def part_seed(seed: int, task: int, place: int) -> int:
    """The documented seed of a part: the task's own for the first, one of its stream for the others."""
    if place == 0:
        return seed
    drawn = np.random.SeedSequence((seed, task, 0, 0, PURPOSES["parts"], place))
    return int(drawn.generate_state(1, np.uint64)[0]) // 2


def columns_by_pattern(
    model: nn.Module, patterns: Sequence[str], names: Sequence[str] | None = None
) -> list[Tensor]:
    """Where the entries of each pattern lie in the columns of the named (or trained) parameters."""
    named, at, places = dict(model.named_parameters()), 0, {}
    for name in [n for n, p in named.items() if p.requires_grad] if names is None else names:
        places[name] = torch.arange(at, at + named[name].numel())
        at += named[name].numel()
    none = torch.zeros(0, dtype=torch.int64)
    found = names_by_pattern(model, patterns, list(places))
    return [torch.cat([none, *(places[name] for name in group)]) for group in found]


def names_by_pattern(
    model: nn.Module, patterns: Sequence[str], names: Sequence[str] | None = None
) -> list[list[str]]:
    """The parameters of each pattern: one goes to the first that fits its name or a class of its layer."""
    if names is None:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
    found: list[list[str]] = [[] for _ in patterns]
    for name in names:
        kinds = type(model.get_submodule(name.rpartition(".")[0])).__mro__
        words = [name, *(kind.__name__ for kind in kinds[: kinds.index(nn.Module)])]
        fits = [k for k, p in enumerate(patterns) if any(fnmatch(word, p) for word in words)]
        found[fits[0]].append(name)
    return found


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """θ: ``model.parameters()`` without the frozen ones (torch lists a tied one once)."""
    return [p for p in model.parameters() if p.requires_grad]


def gradient(scalar: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """∇θ of a scalar as one vector; zeros where a parameter plays no part."""
    found = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
    pieces = [
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
    ]
    return torch.cat([piece.flatten() for piece in pieces]).double()


def log_likelihood_loss(outputs: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """Minus the log-probability of the labels of one example, summed over labelled positions."""
    log_p = outputs[0].log_softmax(-1)
    labels = batch[1][0]
    if labels.dim() == 0:
        return -log_p[labels]
    total = outputs.sum() * 0
    for position, label in enumerate(labels.tolist()):
        if label != -100:
            total = total - log_p[position, label]
    return total


def scalars(
    importance: hf.Importance,
    outputs: Tensor,
    batch: tuple[Tensor, ...],
    uniform: float,
    loss: Loss,
) -> list[Tensor]:
    """The potentials φ of one example, one per row it contributes."""
    z = outputs[0]
    if isinstance(importance, hf.MAS):
        f = z if importance.outputs == "logits" else z.softmax(-1)
        return [(f * f).sum()]
    if isinstance(importance, hf.Custom):
        return [importance.fn(outputs, batch)[0]]
    assert isinstance(importance, hf.EWC)
    if importance.labels == "true":
        return [loss(outputs, batch)]
    log_p = z.log_softmax(-1)
    p = log_p.detach().exp()
    if importance.labels == "expected":
        return [p[c].sqrt() * log_p[c] for c in range(len(p))]
    if importance.labels == "predicted":
        return [-log_p[int(p.argmax())]]
    below = 0.0
    for c in range(len(p)):  # the first class whose cumulative probability exceeds the uniform
        below += float(p[c])
        if uniform < below:
            return [-log_p[c]]
    return [-log_p[len(p) - 1]]


def rows(
    model: nn.Module,
    columns: tuple[Tensor, ...],
    importance: hf.Importance,
    *,
    seed: int = 0,
    task: int = 0,
    loss: Loss = log_likelihood_loss,
    forward: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch[0]),
    parameters: Sequence[str] | None = None,
) -> Tensor:
    """W, in order of arrival: row i·K + c for the c-th row of example i.

    For sliced Cramér preservation these are the (at most K) rows that are streamed.
    """
    if isinstance(importance, hf.SCP):
        return _slice_rows(importance, mean_jacobian(model, columns, forward), seed, task)
    model = copy.deepcopy(model).eval()
    named = dict(model.named_parameters())
    theta = trainable(model) if parameters is None else [named[name] for name in parameters]
    uniforms = generator(seed, task, "labels")
    found = []
    for i in range(len(columns[0])):
        one = tuple(column[i : i + 1] for column in columns)
        for scalar in scalars(importance, forward(model, one), one, uniforms.random(), loss):
            found.append(gradient(scalar, theta))
    return torch.stack(found)


def mean_jacobian(
    model: nn.Module,
    columns: tuple[Tensor, ...],
    forward: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch[0]),
) -> Tensor:
    """J̄ (K, m): the Jacobian of the logits, averaged over examples."""
    model = copy.deepcopy(model).eval()
    theta, total, count = trainable(model), None, len(columns[0])
    for i in range(count):
        outputs = forward(model, tuple(column[i : i + 1] for column in columns))[0]
        jacobian = torch.stack([gradient(z, theta) for z in outputs])
        total = jacobian if total is None else total + jacobian
    assert total is not None
    return total / count


def slices(importance: hf.SCP, classes: int, seed: int, task: int) -> Tensor:
    """ξ (L, K): directions that are uniform on the sphere."""
    assert importance.slices is not None
    xi = generator(seed, task, "slices").standard_normal((importance.slices, classes))
    return torch.stack([torch.from_numpy(row / np.linalg.norm(row)) for row in xi])


def _slice_rows(importance: hf.SCP, jacobian: Tensor, seed: int, task: int) -> Tensor:
    classes = len(jacobian)
    if importance.slices is None:
        return jacobian / classes**0.5
    xi = slices(importance, classes, seed, task)
    if importance.slices <= classes:
        return xi @ jacobian / importance.slices**0.5
    A = xi.T @ xi / importance.slices
    return torch.linalg.cholesky(A).T @ jacobian


def omega(
    model: nn.Module,
    columns: tuple[Tensor, ...],
    importance: hf.Importance,
    *,
    seed: int = 0,
    task: int = 0,
    **options: Any,
) -> Tensor:
    """Ω by definition, (m, m): the mean outer product of rows, or of slices."""
    if not isinstance(importance, hf.SCP):
        W = rows(model, columns, importance, seed=seed, task=task, **options)
        return W.T @ W / len(columns[0])
    jacobian = mean_jacobian(model, columns)
    if importance.slices is None:
        return jacobian.T @ jacobian / len(jacobian)
    g = [xi @ jacobian for xi in slices(importance, len(jacobian), seed, task)]
    return sum((torch.outer(row, row) for row in g), torch.zeros(())) / len(g)


def divisor(importance: hf.Importance, examples: int) -> int:
    """What WᵀW is divided by: the slices of SCP are means already."""
    return 1 if isinstance(importance, hf.SCP) else examples


class Hash:
    """A recorded hash in Python integers."""

    def __init__(self, size: int, seed: int, task: int, purpose: str, copy_: int = 0) -> None:
        drawn = generator(seed, task, purpose, copy_).integers(0, PRIME, size=6)
        c = [int(x) for x in drawn]
        self.size, self.bucket_coefficients, self.sign_coefficients = size, c[:2], c[2:]

    @property
    def id(self) -> str:
        text = f"{self.size}:{tuple(self.bucket_coefficients)}:{tuple(self.sign_coefficients)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def bucket(self, i: int) -> int:
        a, b = self.bucket_coefficients
        return (a * i + b) % PRIME % self.size

    def sign(self, i: int) -> int:
        c3, c2, c1, c0 = self.sign_coefficients
        return -1 if (c3 * i**3 + c2 * i**2 + c1 * i + c0) % PRIME % 2 else 1

    def matrix(self, count: int) -> Tensor:
        """S (t, count): one signed entry per column."""
        S = torch.zeros(self.size, count, dtype=torch.float64)
        for i in range(count):
            S[self.bucket(i), i] = self.sign(i)
        return S


def count_sketch(
    W: Tensor, size: int, *, seed: int = 0, task: int = 0, copies: int = 1
) -> tuple[Tensor, tuple[str, ...]]:
    """S W for every copy, stacked and scaled so that FᵀF is the average; and the hash ids."""
    hashes = [Hash(size, seed, task, "sketch", c) for c in range(copies)]
    F = torch.cat([h.matrix(len(W)) @ W for h in hashes]) / copies**0.5
    return F, tuple(h.id for h in hashes)


def dense_sketch(W: Tensor, size: int, kind: str, *, seed: int = 0, task: int = 0) -> Tensor:
    """S W / √t, the numbers of 1,024 consecutive rows from one generator each."""
    F = torch.zeros(size, W.shape[1], dtype=torch.float64)
    for number, part in enumerate(W.split(1024)):
        stream = generator(seed, task, "entries", number)
        if kind == "gaussian":
            S = stream.standard_normal((1024, size))
        else:
            S = 1.0 - 2.0 * stream.integers(0, 2, (1024, size), dtype=np.int8)
        F = F + torch.from_numpy(S[: len(part)]).T @ part
    return F / size**0.5


def srht(W: Tensor, size: int, block: int, *, seed: int = 0, task: int = 0) -> Tensor:
    """Block by block: signs, the whole orthonormal transform, a sample of its rows, signs."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < block:
        H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), H)
    H = H / block**0.5
    F = torch.zeros(size, W.shape[1], dtype=torch.float64)
    for number, part in enumerate(W.split(block)):
        stream = generator(seed, task, "entries", number)
        sampled = stream.choice(block, size, replace=False)
        D, R = (1.0 - 2.0 * stream.integers(0, 2, k, dtype=np.int8) for k in (block, size))
        padded = torch.zeros(block, W.shape[1], dtype=torch.float64)
        padded[: len(part)] = part
        transformed = H @ torch.diag(torch.from_numpy(D)) @ padded
        F = F + torch.diag(torch.from_numpy(R)) @ transformed[sampled]
    return F * (block / size) ** 0.5


def nystrom(matrix: Tensor, size: int, seed: int = 0) -> Tensor:
    """Y (GᵀY)⁺ Yᵀ, as Ω^½ P Ω^½ with the projector P onto the range of Ω^½ G."""
    m = len(matrix)
    G = torch.from_numpy(generator(seed, 0, "test_matrix").standard_normal((m, min(size, m))))
    values, vectors = torch.linalg.eigh(matrix)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    left, singular, _ = torch.linalg.svd(root @ G, full_matrices=False)
    basis = root @ left[:, singular > 1e-8 * singular.max()]
    return basis @ basis.T


def best_rank(matrix: Tensor, rank: int, shrink: bool = False) -> Tensor:
    """The truncated eigendecomposition of a dense matrix; or the Frequent Directions step."""
    values, vectors = torch.linalg.eigh(matrix)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    if rank >= len(values):
        return matrix
    kept = values[:rank] - (values[rank] if shrink else 0)
    return vectors[:, :rank] * kept @ vectors[:, :rank].T


def streamed_low_rank(
    W: Tensor,
    rank: int,
    group: int | str,
    shrink: bool = False,
    seed: int = 0,
    task: int = 0,
    work: int = 10**10,
) -> Tensor:
    """LowRank by dense algebra: single rows, then signed group sums; truncate when full.

    While streaming, at least 32 directions are kept; the last truncation is to ``rank``.
    """
    width = max(rank, 32)
    h = Hash(1, seed, task, "groups")
    alone = max(rank, work // (7 * width * W.shape[1])) if group == "auto" else rank
    single = len(W) if group == 1 else min(alone, len(W))
    entering = list(W[:single])
    first, sums = single, 0
    while first < len(W):
        grown = min(4 ** (1 + sums // (width // 2)), max(64, 6 * rank))
        size = grown if isinstance(group, str) else group
        members = range(first, min(first + size, len(W)))
        entering.append(sum((h.sign(i) * W[i] for i in members), torch.zeros(())))
        first, sums = first + size, sums + 1
    total = torch.zeros(W.shape[1], W.shape[1], dtype=torch.float64)
    for i, row in enumerate(entering, start=1):
        total = total + torch.outer(row, row)
        if i % width == 0 or i == len(entering):
            total = best_rank(total, width, shrink)
    return best_rank(total, rank, shrink) if rank < width else total


def blocks(matrix: Tensor, borders: Sequence[int]) -> Tensor:
    """The blocks between consecutive borders; zero elsewhere."""
    out = torch.zeros_like(matrix)
    for start, end in itertools.pairwise(borders):
        out[start:end, start:end] = matrix[start:end, start:end]
    return out


def layer_borders(model: nn.Module) -> list[int]:
    """Where a new module begins in θ."""
    seen: set[int] = set()
    borders = [0]
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        size = sum(p.numel() for p in own if id(p) not in seen)
        seen.update(id(p) for p in own)
        if size:
            borders.append(borders[-1] + size)
    return borders


def quadratic(omega_: Tensor, theta: Tensor, anchor: Tensor, strength: float) -> Tensor:
    """½λ(θ − θ*)ᵀΩ(θ − θ*)."""
    delta = theta - anchor
    return 0.5 * strength * delta @ omega_ @ delta
