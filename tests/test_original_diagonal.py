"""The original code's diagonal against a direct transcription of what it computes."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.models import mlp
from holdfast.original_diagonal import OriginalDiagonal
from holdfast.streams import Split


def split(count: int = 30) -> Split:
    return Split(torch.randn(count, 2), torch.randint(0, 3, (count,)))


def transcribed(model: nn.Module, data: Split, size: int, rule: str) -> Tensor:
    """Per minibatch: flatten all outputs, one softmax, one gradient, squared; the sum over minibatches."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for x, _ in data.batches(size):
        p = torch.softmax(model(x).view(1, -1), dim=1)
        loss = -torch.log(p[0, int(p.argmax())]) if rule == "ewc" else (p**2).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        total += torch.cat([g.flatten() for g in gradients]) ** 2
    return total


RULES = {"ewc": hf.EWC(labels="predicted"), "mas": hf.MAS(outputs="softmax")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("normalise", "divisor"), [("batches", 3), ("examples", 30)])
def test_it_is_what_the_original_code_computes(rule: str, normalise: str, divisor: int) -> None:
    model, data = mlp((2, 5, 3)), split()
    regularizer = hf.Regularizer(RULES[rule], hf.Diagonal(), strength=2.0)
    original = OriginalDiagonal(normalise)  # type: ignore[arg-type]
    penalty = original.consolidate(regularizer, model, data, 10, seed=0)
    expected = transcribed(model, data, 10, rule) / divisor
    step = torch.randn(len(expected))
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            piece = step[start : start + parameter.numel()]
            parameter.add_(piece.view_as(parameter))
            start += parameter.numel()
    torch.testing.assert_close(penalty(model), (expected * step**2).sum())  # ½ · 2


def test_it_is_not_the_correct_diagonal() -> None:
    model, data = mlp((2, 5, 3)), split()
    regularizer = hf.Regularizer(RULES["ewc"], hf.Diagonal())
    original = OriginalDiagonal().consolidate(regularizer, model, data, 10, seed=0)
    correct = regularizer.consolidate(model, data.batches(10), seed=0)
    cosine = torch.cosine_similarity(original.matrix.diagonal(), correct.matrix.diagonal(), 0)
    assert cosine < 0.9


def test_history_starts_from_zero_as_in_the_original_code() -> None:
    model, first, second = mlp((2, 5, 3)), split(), split()
    history = hf.MovingAverage(new=0.5, start="zero")
    regularizer = hf.Regularizer(RULES["mas"], hf.Diagonal(), history=history)
    original = OriginalDiagonal()
    penalty = original.consolidate(regularizer, model, first, 10, seed=0)
    a, b = (transcribed(model, data, 10, "mas") / 3 for data in (first, second))
    torch.testing.assert_close(penalty.matrix.diagonal(), 0.5 * a)
    penalty = original.consolidate(regularizer, model, second, 10, previous=penalty, seed=0)
    torch.testing.assert_close(penalty.matrix.diagonal(), 0.25 * a + 0.5 * b)


def test_the_order_decides_the_minibatches() -> None:
    model, data = mlp((2, 5, 3)), split()
    regularizer = hf.Regularizer(RULES["ewc"], hf.Diagonal())
    order = torch.randperm(len(data))
    shuffled = Split(data.inputs[order], data.labels[order])
    penalty = OriginalDiagonal().consolidate(regularizer, model, data, 10, order=order, seed=0)
    expected = transcribed(model, shuffled, 10, "ewc") / 3
    torch.testing.assert_close(penalty.matrix.diagonal(), expected)


def test_what_it_cannot_mean_is_refused() -> None:
    model, data = mlp((2, 5, 3)), split(25)
    regularizer = hf.Regularizer(RULES["ewc"], hf.Diagonal())
    with pytest.raises(ValueError, match="25 examples are no multiple of the batch size 10"):
        OriginalDiagonal("examples").consolidate(regularizer, model, data, 10)
    wrong = dataclasses.replace(regularizer, importance=hf.MAS(outputs="logits"))
    with pytest.raises(ValueError, match=r"got MAS\(outputs='logits'\)"):
        OriginalDiagonal().consolidate(wrong, model, data, 10)
    with pytest.raises(ValueError, match="unknown normalise 'rows'; known: batches, examples"):
        OriginalDiagonal("rows")  # type: ignore[arg-type]
