r"""Kronecker approximations by definition: one example at a time, patches by hand, dense products."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf
import reference

DOUBLE = torch.float64
SHARE = 2**-26  # of its diagonal: directions of less curvature move no centre
STEPS = 500  # towards a centre, of networks this small
Places = dict[
    str, Tensor
]  # layer -> where the entries of its matrices are in θ, (groups, out, in)


def held_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def places(model: nn.Module, names: Sequence[str] | None = None) -> Places:
    """The layers that are matrices: Linear and convolutions, weight held and in no other module."""
    names = held_names(model) if names is None else list(names)
    everywhere = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    named, start, first = dict(model.named_parameters()), 0, {}
    for name in names:
        first[name] = torch.arange(start, start + named[name].numel())
        start += named[name].numel()
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            continue
        own = dict(module.named_parameters(recurse=False))
        shared = any(everywhere.count(id(p)) > 1 for p in own.values())
        prefix = f"{path}." if path else ""
        if shared or set(own) - {"weight", "bias"} or f"{prefix}weight" not in first:
            continue
        groups = getattr(module, "groups", 1)
        matrix = first[f"{prefix}weight"].view(groups, len(own["weight"]) // groups, -1)
        if f"{prefix}bias" in first:
            bias = first[f"{prefix}bias"].view(groups, -1, 1)
            matrix = torch.cat([matrix, bias], 2)
        found[path] = matrix
    return found


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer multiplies with, (groups, T, in), for the input of one example, cut by hand."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    x = x[0]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = nn.functional.pad(x[None], layer._reversed_padding_repeated_twice, mode=mode)[0]
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    each = [
        range(0, size - d * (k - 1), s)
        for size, k, s, d in zip(x.shape[1:], kernel, stride, dilation, strict=True)
    ]
    found = []
    for corner in itertools.product(*each):
        inside = x
        for axis, (at, k, d) in enumerate(zip(corner, kernel, dilation, strict=True), start=1):
            inside = inside.index_select(axis, torch.tensor([at + d * j for j in range(k)]))
        found.append(inside.reshape(layer.groups, -1))
    return torch.stack(found, 1)


def outputs(layer: nn.Module, g: Tensor) -> Tensor:
    """Gradients of the outputs of one example, (groups, T, out)."""
    if isinstance(layer, nn.Linear):
        return g.reshape(1, -1, g.shape[-1])
    return g[0].reshape(layer.groups, g.shape[1] // layer.groups, -1).transpose(1, 2)


Pairs = dict[
    str, list[tuple[Tensor, Tensor]]
]  # per layer and row: (groups, T, in), (groups, T, out)


def pairs(
    model: nn.Module,
    columns: tuple[Tensor, ...],
    importance: hf.Importance,
    at: Places,
    *,
    seed: int = 0,
    task: int = 0,
    loss: reference.Loss = reference.log_likelihood_loss,
) -> Pairs:
    """Inputs and gradients of every row, of the layers that are called exactly once."""
    model = copy.deepcopy(model).eval()
    modules = {path: module for path, module in model.named_modules() if path in at}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def hook(path: str) -> Any:
        def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen.setdefault(path, []).append((args[0].detach(), output))

        return keep

    for path, module in modules.items():
        if type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d):
            module.register_forward_hook(hook(path))
    uniforms = reference.generator(seed, task, "labels")
    found: Pairs = {}
    for i in range(len(columns[0])):
        one = tuple(column[i : i + 1] for column in columns)
        seen.clear()
        z = model(one[0])
        for scalar in reference.scalars(importance, z, one, uniforms.random(), loss):
            for path, calls in seen.items():
                if len(calls) != 1:
                    continue
                x, y = calls[0]
                (g,) = torch.autograd.grad(scalar, y, retain_graph=True, allow_unused=True)
                g = torch.zeros_like(y) if g is None else g
                a = patches(modules[path], x.double())
                if a.shape[2] < at[path].shape[2]:  # the bias
                    a = torch.cat([a, torch.ones_like(a[..., :1])], 2)
                found.setdefault(path, []).append((a, outputs(modules[path], g.double())))
    return found


def factors(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """E[a aᵀ] over examples and positions with a gradient, Σ g gᵀ over all; (groups, ·, ·) each."""
    alive = [[t for t in range(g.shape[1]) if bool(g[:, t].any())] for _, g in found]
    kept = [a[:, t] for (a, _), t in zip(found, alive, strict=True)]
    A = torch.stack([torch.einsum("gti,gtj->gij", a, a) for a in kept])
    G = torch.stack([torch.einsum("gti,gtj->gij", g, g) for _, g in found])
    return A.sum(0) / max(1, sum(map(len, alive))), G.sum(0)


def explained(found: list[tuple[Tensor, Tensor]], W: Tensor, matrices: Tensor) -> bool:
    """Whether every row is the sum of the outer products of its positions."""
    rows = torch.stack([torch.einsum("gto,gti->goi", g, a) for a, g in found])
    return torch.allclose(rows.flatten(1), W[:, matrices.flatten()], rtol=1e-8, atol=1e-12)


def partial_traces(block: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(A, G) of a matrix on vec(rows × columns) with G ⊗ A of the same partial traces and trace."""
    four = block.reshape(rows, columns, rows, columns)
    A, G = torch.einsum("ikil->kl", four), torch.einsum("ikjk->ij", four)
    trace = block.trace()
    return (A / trace if trace > 0 else A), G


def nearest(block: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(A, G) with G ⊗ A nearest in Frobenius norm: the leading singular pair of the rearrangement."""
    four = block.reshape(rows, columns, rows, columns)
    U, S, V = torch.linalg.svd(four.permute(0, 2, 1, 3).reshape(rows * rows, -1))
    G, A = S[0] * U[:, 0].reshape(rows, rows), V[0].reshape(columns, columns)
    return (A, G) if G.trace() > 0 else (-A, -G)


def corrected(block: Tensor, A: Tensor, G: Tensor) -> Tensor:
    """The exact diagonal of ``block`` in the eigenvectors of G ⊗ A."""
    U = torch.kron(torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1])
    return U * (U.T @ block @ U).diagonal() @ U.T


def thin(factor: Tensor, rank: int | None) -> Tensor:
    """The leading directions, one by one, and the diagonal of the others."""
    if rank is None:
        return factor
    values, vectors = torch.linalg.eigh(factor)
    kept, others = torch.zeros_like(factor), torch.zeros_like(factor)
    for place, (value, vector) in enumerate(zip(values.flip(0), vectors.T.flip(0), strict=True)):
        (kept if place < rank else others).add_(value * torch.outer(vector, vector))
    return kept + others.diagonal().diag()


def put(out: Tensor, at: Tensor, block: Tensor) -> None:
    out[at.flatten().unsqueeze(1), at.flatten()] = block


def take(matrix: Tensor, at: Tensor) -> Tensor:
    return matrix[at.flatten().unsqueeze(1), at.flatten()]


def kronecker(
    approximation: hf.Kronecker,
    W: Tensor,
    model: nn.Module,
    columns: tuple[Tensor, ...],
    importance: hf.Importance,
    *,
    seed: int = 0,
    task: int = 0,
    names: Sequence[str] | None = None,
    loss: reference.Loss = reference.log_likelihood_loss,
    unread: Sequence[str] = (),
) -> Tensor:
    """What stands for WᵀW; layers in ``unread``, or whose pairs do not explain W, by their rows."""
    exact, at = W.T @ W, places(model, names)
    out = exact.diagonal().diag()
    seen: Pairs = {}
    if not isinstance(importance, hf.SCP):
        seen = pairs(model, columns, importance, at, seed=seed, task=task, loss=loss)
    for path, matrices in at.items():
        if path in unread or (path in seen and not explained(seen[path], W, matrices)):
            seen.pop(path, None)
        for group, place in enumerate(matrices):
            block = take(exact, place)
            if path in seen:
                A, G = (factor[group] for factor in factors(seen[path]))
            else:
                A, G = partial_traces(block, *place.shape)
            product = torch.kron(thin(G, approximation.rank), thin(A, approximation.rank))
            put(
                out,
                place,
                corrected(block, A, G) if approximation.correction == "eigen" else product,
            )
    return out


def merged(
    approximation: hf.Kronecker,
    total: Tensor,
    model: nn.Module,
    names: Sequence[str] | None = None,
) -> Tensor:
    """What stands for a sum of Kronecker approximations, from the sum alone."""
    if approximation.merge == "stack":
        return total
    assert approximation.rank is None, "needs the terms: see merged_thin"
    assert (approximation.correction, approximation.merge) != ("eigen", "nearest"), (
        "needs the terms"
    )
    rule = partial_traces if approximation.merge == "average" else nearest
    out = total.clone()
    for matrices in places(model, names).values():
        for place in matrices:
            block = take(total, place)
            marginals = partial_traces(block, *place.shape)
            A, G = rule(block, *place.shape)
            if approximation.correction == "eigen":
                if (
                    approximation.merge == "nearest"
                ):  # of the marginals' products, not of the block
                    raise NotImplementedError("needs the two terms")
                put(out, place, corrected(block, *marginals))
            else:
                put(out, place, torch.kron(G, A))
    return out


def merged_thin(approximation: hf.Kronecker, one: Tensor, two: Tensor, model: nn.Module) -> Tensor:
    """One thin product per layer for the sum of two, each from a whole product of its layer."""
    rank = approximation.rank
    assert rank is not None
    weigh = averages if approximation.merge == "average" else nearest_weights
    out = one + two
    for place in (p for stack in places(model).values() for p in stack):
        terms = [partial_traces(take(term, place), *place.shape) for term in (one, two)]
        A, G = ([thin_parts(term[side], rank) for term in terms] for side in (0, 1))
        weights = weigh([low + rest for low, rest in A], [low + rest for low, rest in G])
        product = [sum(summed(w, *f, rank)) for w, f in zip(weights, (A, G), strict=True)]
        put(out, place, torch.kron(product[1], product[0]))
    return out


Thin = tuple[Tensor, Tensor]  # low rank and diagonal, both as whole matrices
Weights = tuple[Sequence[float], Sequence[float]]  # of A and of G, of both terms


def thin_parts(factor: Tensor, rank: int) -> Thin:
    low = reference.best_rank(factor, rank)
    return low, (factor - low).diagonal().diag()


def summed(weights: Sequence[float], old: Thin, new: Thin, rank: int) -> Thin:
    """The leading directions of both low ranks; what is dropped goes to the diagonal."""
    total = weights[0] * old[0] + weights[1] * new[0]
    low = reference.best_rank(total, rank)
    rest = weights[0] * old[1] + weights[1] * new[1]
    return low, rest + (total - low).diagonal().diag()


def averages(A: list[Tensor], G: list[Tensor]) -> Weights:
    """Weights of both factors that keep both partial traces of G₀ ⊗ A₀ + G₁ ⊗ A₁."""
    of_A, of_G = ([float(m.trace()) for m in factors] for factors in (A, G))
    share = [g / sum(of_G) for g in of_G]
    mean = sum(s * a for s, a in zip(share, of_A, strict=True))
    return share, [a / mean for a in of_A]


def nearest_weights(A: list[Tensor], G: list[Tensor]) -> Weights:
    """Weights of the product nearest to G₀ ⊗ A₀ + G₁ ⊗ A₁: the leading singular pair of Σ vec(G) vec(A)ᵀ."""
    of_A, of_G = (torch.stack([m.flatten() for m in factors], 1) for factors in (A, G))
    U, S, V = torch.linalg.svd(of_G @ of_A.T, full_matrices=False)
    weights = [
        torch.linalg.lstsq(m, v).solution for m, v in ((of_A, S[0] * V[0]), (of_G, U[:, 0]))
    ]
    sign = float(weights[0].sum().sign())
    return (sign * weights[0]).tolist(), (sign * weights[1]).tolist()


def plus_low_rank(
    correction: str, exact: Tensor, low: Tensor, products: Tensor, at: Places
) -> Tensor:
    """Products for what a low rank leaves of the exact matrix, and the low rank, all of them dense."""
    out = (exact.diagonal() - low.diagonal()).clamp(min=0).diag()
    for matrices in at.values():
        if correction == "none":
            left = take(exact, matrices).trace() - take(low, matrices).trace()
            trace = take(products, matrices).trace()
            share = left / trace if trace > 0 else left
            put(out, matrices, share.clamp(min=1e-12) * take(products, matrices))
            continue
        for place in matrices:
            values, U = torch.linalg.eigh(take(products, place))
            values = values - (U.T @ take(low, place) @ U).diagonal()
            put(out, place, U * values.clamp(min=0) @ U.T)
    return out + low


def merged_plus_low_rank(
    correction: str,
    rank: int,
    terms: Sequence[Tensor],
    lows: Sequence[Tensor],
    at: Places,
    shrink: bool = False,
) -> Tensor:
    """One product per layer and ``rank`` rows for a weighted sum of products and low ranks."""
    total, stacked = sum(terms, torch.zeros(())), sum(lows, torch.zeros(()))
    low = reference.best_rank(stacked, rank, shrink)
    dropped = stacked - low
    out = total + dropped.diagonal().diag()
    for matrices in at.values():
        layer = torch.zeros_like(take(total, matrices))
        start = 0
        for place in matrices:
            A, G = partial_traces(take(total, place), *place.shape)
            U = torch.kron(torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1])
            own = take(total + dropped, place)
            block = (
                U * (U.T @ own @ U).diagonal() @ U.T if correction == "eigen" else torch.kron(G, A)
            )
            layer[start : start + len(block), start : start + len(block)] = block
            start += len(block)
        if correction == "none":
            layer *= 1 + take(dropped, matrices).trace() / layer.trace()
        put(out, matrices, layer)
    return out + low


def recentred(total: Tensor, merged_: Tensor, b: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """δᵀΩδ + 2bᵀδ + k of the merged matrix, with the minimum of ``total`` and the value there, nearly.

    Beside its diagonal, and 1.1 times the largest being one, of a direction of eigenvalue λ the share
    P(1 − 2λ) / P(1) is left out, P being the Jacobi polynomial (3/2, −1/2) of as many steps as are made.
    """
    held = total.diagonal() > 0
    root = total.diagonal()[held].rsqrt()
    own = root[:, None] * total[held][:, held] * root + SHARE * torch.eye(len(root), dtype=DOUBLE)
    values, vectors = torch.linalg.eigh(own)
    left = _jacobi(1 - 2 * values / (1.1 * values[-1])) / _jacobi(torch.ones(1, dtype=DOUBLE))
    c = torch.zeros_like(b)
    c[held] = root * (vectors @ ((1 - left) / values * (vectors.T @ (root * b[held]))))
    least = (k - 2 * b @ c + c @ total @ c).clamp(min=0)
    return merged_ @ c, least + c @ merged_ @ c


def _jacobi(x: Tensor, a: float = 1.5, b: float = -0.5) -> Tensor:
    """The Jacobi polynomial of the degree STEPS, by the recurrence of textbooks."""
    before, here = torch.ones_like(x), (a + 1) + (a + b + 2) * (x - 1) / 2
    for n in range(2, STEPS + 1):
        c = 2 * n + a + b
        after = (c - 1) * (c * (c - 2) * x + a * a - b * b) * here
        after -= 2 * (n + a - 1) * (n + b - 1) * c * before
        before, here = here, after / (2 * n * (n + a + b) * (c - 2))
    return here
