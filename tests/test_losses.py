"""Regression, multi-label, token-level and causal language models; what is never guessed."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
import reference
from models_zoo import CASES, IGNORED, VOCABULARY, Network, batches
from recipes_table import ALL_APPROXIMATIONS, approximate, close

SEED = 2
APPROXIMATIONS = (
    "diagonal",
    "block_diagonal-layer",
    "count_sketch",
    "low_rank-single",
    "full-dense",
)


def check(
    model: nn.Module,
    columns: tuple[Tensor, ...],
    loss: Any,
    oracle: reference.Loss,
    approximation: str,
) -> None:
    recipe = hf.Regularizer(hf.EWC(), ALL_APPROXIMATIONS[approximation])
    penalty = recipe.consolidate(model, batches(columns, 4), loss=loss, seed=SEED)
    W = reference.rows(model, columns, hf.EWC(), loss=oracle)
    divisor = len(columns[0])
    close(
        penalty.matrix.dense(),
        approximate(recipe.approximation, W, model, divisor=divisor, seed=SEED),
    )


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_regression(approximation: str) -> None:
    model, (x, _) = CASES["mlp"].model(), CASES["mlp"].columns(9)
    y = torch.randn(9, 3, dtype=torch.float64)

    def half_square(z: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return sum((0.5 * (z[0, k] - batch[1][0, k]) ** 2 for k in range(3)), torch.zeros(()))

    check(model, (x, y), hf.losses.gaussian, half_square, approximation)


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_several_labels(approximation: str, dtype: torch.dtype) -> None:
    model, (x, _) = CASES["mlp"].model(), CASES["mlp"].columns(9)
    y = torch.randint(2, (9, 3)).to(dtype)

    def minus_log(z: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        p = z[0].sigmoid()
        return -sum((p[k] if batch[1][0, k] else 1 - p[k]).log() for k in range(3))

    check(model, (x, y), hf.losses.bernoulli, minus_log, approximation)


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
@pytest.mark.parametrize("named", [True, False])
def test_tokens_with_ignored_positions(approximation: str, named: bool) -> None:
    """The default for token labels is the same as naming it; a fully ignored row is zero."""
    model, (ids, labels) = CASES["tokens"].model(), CASES["tokens"].columns(9)
    labels[3] = IGNORED
    assert (labels == IGNORED).any(1).sum() > 3
    oracle = reference.log_likelihood_loss
    check(model, (ids, labels), hf.losses.tokens if named else None, oracle, approximation)


def _next_token(z: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    total = z.sum() * 0
    for position in range(z.shape[1] - 1):
        label = int(batch[1][0, position + 1])
        if label != IGNORED:
            total = total - z[0, position].log_softmax(0)[label]
    return total


@pytest.mark.parametrize("approximation", APPROXIMATIONS)
def test_next_token(approximation: str) -> None:
    model, (ids, _) = CASES["tokens"].model(), CASES["tokens"].columns(9)
    labels = ids.clone()
    labels[2, 2:] = IGNORED
    check(model, (ids, labels), hf.losses.next_token, _next_token, approximation)


def test_next_token_from_a_mapping() -> None:
    model, (ids, _) = CASES["tokens"].model(), CASES["tokens"].columns(9)
    recipe = hf.Regularizer(hf.EWC(), hf.Full())
    data = [{"input_ids": ids, "labels": ids}]
    penalty = recipe.consolidate(model, data, loss=hf.losses.next_token)
    W = reference.rows(model, (ids, ids), hf.EWC(), loss=_next_token)
    close(penalty.matrix.dense(), W.T @ W / 9)


def test_a_row_does_not_depend_on_padding() -> None:
    """Sums, not means, over tokens: ignored positions at the end change nothing."""
    model = nn.Embedding(VOCABULARY, VOCABULARY).double()
    ids = torch.randint(VOCABULARY, (6, 4))
    labels = torch.randint(VOCABULARY, (6, 4))
    padded = torch.cat([ids, ids], 1), torch.cat([labels, torch.full_like(labels, IGNORED)], 1)
    recipe = hf.Regularizer(hf.EWC(), hf.Full())
    short = recipe.consolidate(model, [(ids, labels)])
    long = recipe.consolidate(model, [padded])
    close(long.matrix.dense(), short.matrix.dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3)])
def test_float_labels_are_never_guessed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model, (x, _) = CASES["mlp"].model(), CASES["mlp"].columns(6)
    labels = torch.zeros(shape, dtype=dtype)
    recipe = hf.Regularizer(hf.EWC(), hf.Diagonal())
    with pytest.raises(ValueError, match=r"hf\.losses\.gaussian.*hf\.losses\.bernoulli"):
        recipe.consolidate(model, [(x, labels)])


@pytest.mark.parametrize("loss", [hf.losses.gaussian, hf.losses.bernoulli])
def test_targets_that_would_broadcast_are_refused(loss: Any) -> None:
    """(B, 3) outputs against (B,) targets is the classic silent mistake."""
    model, (x, _) = CASES["mlp"].model(), CASES["mlp"].columns(3)
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(3,\)"):
        hf.Regularizer(hf.EWC(), hf.Diagonal()).consolidate(
            model, [(x, torch.zeros(3, dtype=torch.float64))], loss=loss
        )


@pytest.mark.parametrize("mapping", [True, False])
def test_unshifted_causal_labels_are_refused(mapping: bool) -> None:
    model, (ids, _) = CASES["tokens"].model(), CASES["tokens"].columns(6)
    labels = ids.clone()
    labels[:, -1] = IGNORED
    data = [{"input_ids": ids, "labels": labels}] if mapping else [(ids, labels)]
    recipe = hf.Regularizer(hf.EWC(), hf.Diagonal())
    with pytest.raises(ValueError, match=r"hf\.losses\.next_token"):
        recipe.consolidate(model, data)
    recipe.consolidate(model, data, loss=hf.losses.tokens)  # asked for by name, it is done


def test_a_first_batch_without_labelled_tokens_is_not_mistaken_for_unshifted() -> None:
    model, (ids, labels) = CASES["tokens"].model(), CASES["tokens"].columns(6)
    ignored = torch.full_like(labels, IGNORED)
    recipe = hf.Regularizer(hf.EWC(), hf.Full())
    penalty = recipe.consolidate(
        model, [{"input_ids": ids, "labels": ignored}, {"input_ids": ids, "labels": labels}]
    )
    W = reference.rows(model, (ids, labels), hf.EWC())
    close(penalty.matrix.dense(), W.T @ W / 12)


def test_a_loss_of_ones_own() -> None:
    """Any function of outputs and batch, one value per example."""
    model, columns = CASES["mlp"].model(), CASES["mlp"].columns(9)
    smoothing = 0.1

    def smoothed(outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(
            outputs, batch[1], reduction="none", label_smoothing=smoothing
        )

    def oracle(z: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        log_p = z[0].log_softmax(0)
        return -(1 - smoothing) * log_p[batch[1][0]] - smoothing * log_p.mean()

    check(model, columns, smoothed, oracle, "count_sketch")


def test_regression_fisher_of_a_linear_model_by_hand() -> None:
    """w = (z − y)x for one output: Ω = (1/n) Σ (z − y)² x xᵀ."""
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    y = torch.tensor([[0.5], [-2.0]], dtype=torch.float64)
    residual = (model(x) - y).detach()
    expected = (residual * x).T @ (residual * x) / 2
    penalty = hf.Regularizer(hf.EWC(), hf.Full()).consolidate(
        model, [(x, y)], loss=hf.losses.gaussian
    )
    close(penalty.matrix.dense(), expected)


def test_classification_fisher_of_a_bias_by_hand() -> None:
    """The exact Fisher of a softmax bias is diag(p) − ppᵀ."""
    model = Network(2, 2, 2).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "head.bias")
    x = torch.zeros(1, 2, dtype=torch.float64)
    p = copy.deepcopy(model)(x).softmax(1)[0].detach()
    penalty = hf.Regularizer(hf.EWC(labels="expected"), hf.Full()).consolidate(model, [(x,)])
    close(penalty.matrix.dense(), p.diag() - torch.outer(p, p))
    assert math.isclose(float(penalty.matrix.trace()), float(2 * p[0] * p[1]), rel_tol=1e-9)
