"""Every mistake gets an error that says what was expected, what came, and what to do."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast as hf
from holdfast import memory

Batch = tuple[Tensor, ...]

# Small settings of every registered approximation: a new member is tested by adding its row.
SMALL: dict[str, hf.Approximation] = {
    "diagonal": hf.Diagonal(),
    "block_diagonal": hf.BlockDiagonal(size=4),
    "count_sketch": hf.CountSketch(size=2),
    "low_rank": hf.LowRank(rank=2, group=3),
    "full": hf.Full(),
    "diagonal_plus_low_rank": hf.DiagonalPlusLowRank(rank=2, group=3),
    "composite": hf.Composite({"0.*": hf.LowRank(rank=2, group=3), "*": hf.Diagonal()}),
    "dense_sketch": hf.DenseSketch(size=2),
    "osnap": hf.OSNAP(size=2),
    "srht": hf.SRHT(size=2),
    "nystrom": hf.Nystrom(size=2),
    "kronecker": hf.Kronecker(),
    "kronecker_plus_low_rank": hf.KroneckerPlusLowRank(rank=2, group=3),
}
every_approximation = pytest.mark.parametrize("approximation", SMALL.values(), ids=SMALL)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(n: int = 8) -> Batch:
    return torch.randn(n, 3), torch.arange(n) % 2


def consolidate(
    approximation: hf.Approximation | None = None,
    importance: hf.Importance | None = None,
    data: Any = None,
    model: nn.Module | None = None,
    **options: Any,
) -> hf.Penalty:
    regularizer = hf.Regularizer(importance or hf.EWC(), approximation or hf.Diagonal())
    given = [batch()] if data is None else data
    return regularizer.consolidate(
        model or network(), given, **{"seed": 0, "progress": False, **options}
    )


def test_every_approximation_has_a_row() -> None:
    assert SMALL.keys() == hf.APPROXIMATIONS.keys()


# ---- data ----


@every_approximation
@pytest.mark.parametrize(
    "data", [[], iter([]), [batch(0), batch(0)]], ids=["list", "iterator", "empty batches"]
)
def test_empty_data(approximation: hf.Approximation, data: Any) -> None:
    with pytest.raises(
        ValueError, match=r"data is empty: expected at least one .*got none.*pass a"
    ):
        consolidate(approximation, data=data)


def test_an_iterator_that_was_already_read() -> None:
    data = iter([batch()])
    consolidate(data=data)
    with pytest.raises(ValueError, match="an iterator that was read before is empty too"):
        consolidate(data=data)


def test_a_dataset_instead_of_batches() -> None:
    examples = torch.utils.data.TensorDataset(*batch())
    with pytest.raises(TypeError, match=r"TensorDataset, which yields one example .*DataLoader"):
        consolidate(data=examples)
    assert consolidate(data=torch.utils.data.DataLoader(examples, 4)).tasks[0].examples == 8


def test_empty_data_for_slices() -> None:
    with pytest.raises(ValueError, match="the data is empty"):
        consolidate(importance=hf.SCP(), data=[])


@every_approximation
@pytest.mark.parametrize(
    ("unlabelled", "got"),
    [
        (lambda: (torch.randn(4, 3),), r"a tuple of 1"),
        (lambda: [torch.randn(4, 3), None], r"a list of 2"),
        (lambda: torch.randn(4, 3), r"a Tensor"),
    ],
    ids=["tuple", "none", "tensor"],
)
def test_a_batch_without_labels(
    approximation: hf.Approximation, unlabelled: Callable[[], Any], got: str
) -> None:
    message = (
        rf"no labels: expected \(inputs, labels, …\).*got {got}; pass loss=.*'predicted'.*MAS"
    )
    with pytest.raises(ValueError, match=message):
        consolidate(approximation, data=[unlabelled()])


def test_a_mapping_without_labels() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, pixels: Tensor) -> Tensor:
            return self.layer(pixels)

    with pytest.raises(ValueError, match="got a mapping with the keys pixels; pass loss="):
        consolidate(model=Named(), data=[{"pixels": torch.randn(4, 3)}])


def test_labels_that_are_not_needed_are_not_asked_for() -> None:
    for importance in (hf.MAS(), hf.SCP(), hf.EWC(labels="predicted"), hf.EWC(labels="sampled")):
        consolidate(importance=importance, data=[(torch.randn(4, 3),)])


# ---- losses ----


def spoiled(value: float) -> Callable[[Tensor, Batch], Tensor]:
    """A loss that is ``value`` for the example whose first input is 100."""

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        finite = F.cross_entropy(outputs, batch[1], reduction="none")
        return torch.where(batch[0][:, 0] == 100, finite + value, finite)

    return loss


@every_approximation
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 5, 19])
def test_a_loss_that_is_not_finite_names_the_example(
    approximation: hf.Approximation, value: float, place: int
) -> None:
    """By its position in the data, however rows are batched and regrouped."""
    x, y = batch(20)
    x[place, 0] = 100
    data = list(zip(x.split(4), y.split(4), strict=True))
    message = rf"example {place} \(counted from 0 in order of arrival\) is {value}, expected a fin"
    with pytest.raises(ValueError, match=message + r".*look at that example"):
        consolidate(approximation, data=data, loss=spoiled(value))


@pytest.mark.parametrize("importance", [hf.MAS(), hf.SCP(), hf.EWC(labels="expected")], ids=str)
def test_an_input_that_is_not_finite_names_the_example(importance: hf.Importance) -> None:
    x = torch.randn(12, 3)
    x[7, 1] = float("nan")
    for approximation in (hf.Diagonal(), hf.CountSketch(size=2), hf.LowRank(rank=2)):
        with pytest.raises(ValueError, match=r"of example 7 \(counted from 0 .*is \[?nan"):
            consolidate(approximation, importance, [(part,) for part in x.split(5)])


def test_a_gradient_that_is_not_finite_names_the_example() -> None:
    """The loss is fine, its derivative is not: the norm at zero."""
    model = nn.Linear(3, 2, bias=False)
    x = torch.randn(6, 3)
    x[4] = 0.0
    root = hf.Custom(lambda outputs, batch: outputs.square().sum(1).sqrt())
    with pytest.raises(ValueError, match=r"gradient of example 4 .*loss is finite; look for a sq"):
        consolidate(hf.Diagonal(), root, [(x,)], model)
    with pytest.raises(ValueError, match=r"matrix has NaN or inf entries in: weight; .*float64"):
        consolidate(hf.CountSketch(size=2), root, [(x,)], model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_parameter_that_is_not_finite_is_named(value: float) -> None:
    model = network()
    with torch.no_grad():
        model[2].weight[1, 1] = value  # type: ignore[index, union-attr]
    with pytest.raises(
        ValueError, match=r"parameter 2\.weight holds NaN or inf.*go back to finite"
    ):
        consolidate(model=model)


@every_approximation
def test_a_batch_mean_is_not_enough(approximation: hf.Approximation) -> None:
    def mean(outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    message = r"one value per example, shape \(8,\), got \(\); a batch mean .*reduction='none'"
    with pytest.raises(ValueError, match=message):
        consolidate(approximation, loss=mean)
    with pytest.raises(ValueError, match=r"shape \(8,\), got \(1,\); a batch mean is not enough"):
        consolidate(approximation, loss=lambda o, b: mean(o, b).reshape(1))


@every_approximation
def test_a_loss_per_token_is_summed_by_the_caller(approximation: hf.Approximation) -> None:
    def per_output(outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.square()

    message = r"shape \(8,\), got \(8, 2\); sum over what belongs to one example"
    with pytest.raises(ValueError, match=message):
        consolidate(approximation, loss=per_output)
    with pytest.raises(ValueError, match=message):
        consolidate(approximation, hf.Custom(per_output))


def test_a_loss_that_is_no_tensor() -> None:
    with pytest.raises(ValueError, match="expected one value per example, got float"):
        consolidate(loss=lambda outputs, batch: 3.0)


@every_approximation
def test_a_potential_that_does_not_depend_on_the_parameters(
    approximation: hf.Approximation,
) -> None:
    message = r"does not depend on any held parameter; was it detached, or .*frozen or excluded"
    for fn in (lambda o, b: b[0].sum(1), lambda o, b: o.detach().sum(1)):
        with pytest.raises(ValueError, match=message):
            consolidate(approximation, hf.Custom(fn))


@every_approximation
def test_rows_that_are_all_zero_are_said(approximation: hf.Approximation) -> None:
    zero = hf.Custom(lambda outputs, batch: 0 * outputs.sum(1))
    with pytest.warns(hf.ImportanceWarning, match=r"matrix is zero.*holds nothing.*above zero"):
        penalty = consolidate(approximation, zero)
    assert penalty(network()).item() == 0.0


class Pair(nn.Module):
    """A network that returns more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


@pytest.mark.parametrize(
    "importance", [hf.EWC(), hf.EWC(labels="expected"), hf.MAS(), hf.SCP()], ids=str
)
def test_a_model_that_returns_a_tuple(importance: hf.Importance) -> None:
    for approximation in (hf.Diagonal(), hf.CountSketch(size=1)):
        with pytest.raises(ValueError, match=r"tuple.*pass forward="):
            consolidate(approximation, importance, model=Pair())
        consolidate(approximation, importance, model=Pair(), forward=lambda m, b: m(b[0])[0])


def test_labels_from_the_model_have_no_use_for_a_loss() -> None:
    with pytest.raises(ValueError, match=r"no use for loss=; leave it out, or use labels='true'"):
        consolidate(importance=hf.EWC(labels="sampled"), loss=lambda o, b: o.sum(1))


# ---- recipes ----

COUNTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("size", lambda v: hf.CountSketch(size=v)),
    ("copies", lambda v: hf.CountSketch(copies=v)),
    ("rank", lambda v: hf.LowRank(rank=v)),
    ("group", lambda v: hf.LowRank(group=v)),
    ("size", lambda v: hf.BlockDiagonal(size=v)),
    ("size", lambda v: hf.DenseSketch(size=v)),
    ("size", lambda v: hf.OSNAP(size=v)),
    ("nonzeros", lambda v: hf.OSNAP(nonzeros=v)),
    ("size", lambda v: hf.SRHT(size=v)),
    ("block", lambda v: hf.SRHT(block=v)),
    ("size", lambda v: hf.Nystrom(size=v)),
    ("slices", lambda v: hf.SCP(slices=v)),
]


@pytest.mark.parametrize(
    ("name", "make"), COUNTS, ids=[f"{n}{i}" for i, (n, _) in enumerate(COUNTS)]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, 2.5, True, False, "50", [50]])
def test_counts_are_positive_integers(name: str, make: Callable[[Any], Any], value: Any) -> None:
    shown = re.escape(repr(value))
    with pytest.raises(ValueError, match=rf"{name} must be a positive integer.*got {shown}"):
        make(value)


@pytest.mark.parametrize("limit", [0, -3, 2.5, True, "5"])
def test_limits_are_positive_integers(limit: Any) -> None:
    message = rf"limit must be a positive integer or None for all examples, got {limit!r}"
    with pytest.raises(ValueError, match=message):
        consolidate(limit=limit)


@pytest.mark.parametrize("seed", [-1, 1.5, True, "0"])
def test_seeds_are_not_negative(seed: Any) -> None:
    with pytest.raises(ValueError, match=rf"seed must be a non-negative integer, got {seed!r}"):
        consolidate(seed=seed)


@pytest.mark.parametrize("strength", [-1.0, float("nan"), float("inf"), "1", None, True])
def test_strengths_are_finite_and_not_negative(strength: Any) -> None:
    message = rf"strength must be a finite number ≥ 0, got {strength!r}"
    with pytest.raises(ValueError, match=message):
        hf.Regularizer(hf.EWC(), hf.Diagonal(), strength=strength)
    with pytest.raises(ValueError, match=message):
        consolidate().with_strength(strength)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hf.EWC(labels="guessed"), r"labels 'guessed'; known: true, sampled, expected, p"),
        (lambda: hf.MAS(outputs="probabilities"), r"outputs 'probab.*known: logits, softmax"),
        (lambda: hf.CountSketch(merge="sum"), r"merge must be 'rows' or 'stack', got 'sum'"),
        (lambda: hf.LowRank(merge="sum"), r"merge must be 'rows' or 'stack', got 'sum'"),
        (lambda: hf.DenseSketch(merge="sum"), r"merge must be 'rows' or 'stack', got 'sum'"),
        (lambda: hf.DenseSketch(kind="cauchy"), r"kind must be 'rademacher' or 'g.*got 'cauchy'"),
        (lambda: hf.OSNAP(merge="sum"), r"merge must be 'rows' or 'stack', got 'sum'"),
        (lambda: hf.OSNAP(size=50, nonzeros=4), r"multiple of nonzeros=4, got 50; 52 is one"),
        (lambda: hf.SRHT(merge="sum"), r"merge must be 'rows' or 'stack', got 'sum'"),
        (lambda: hf.SRHT(size=5, block=12), r"power of two and at least size=5, got 12; 8 is the"),
        (lambda: hf.SRHT(size=9, block=8), r"power of two and at least size=9, got 8; 16 is the"),
        (lambda: hf.Nystrom(merge="sum"), r"merge must be 'rows' or 'stack', got 'sum'"),
        (lambda: hf.Nystrom(seed=-1), r"seed must be a non-negative integer, got -1"),
        (lambda: hf.Nystrom(seed=True), r"seed must be a non-negative integer, got True"),
        (lambda: hf.BlockDiagonal(by="module"), r"by must be 'size' or 'layer', got 'module'"),
        (lambda: hf.Full(form="sparse"), r"form must be 'auto', .*got 'sparse'"),
        (lambda: hf.MovingAverage(start="none"), r"start must be 'first' or 'zero', got 'none'"),
        (lambda: hf.MovingAverage(new=0.0), r"new must lie in \(0, 1\], got 0\.0"),
        (lambda: hf.MovingAverage(new=1.1), r"new must lie in \(0, 1\], got 1\.1"),
        (lambda: hf.MovingAverage(new=float("nan")), r"new must lie in \(0, 1\], got nan"),
        (
            lambda: hf.Regularizer(hf.EWC(), hf.Diagonal(), anchor="first"),
            r"anchor must be 'latest' or 'each', got 'first'",
        ),
    ],
)
def test_choices_list_what_is_known(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_class_where_an_instance_belongs() -> None:
    R: Any = hf.Regularizer
    with pytest.raises(
        TypeError,
        match=r"importance must be an instance of hf\.Importance, got the"
        r" class .*EWC.*call it with \(\), as in importance=hf\.EWC\(\)",
    ):
        R(hf.EWC, hf.Diagonal())
    with pytest.raises(
        TypeError, match=r"approximation must be .*as in approximation=hf\.Kronecker"
    ):
        R(hf.EWC(), hf.Diagonal)
    with pytest.raises(TypeError, match=r"history must be an instance.*history=hf\.Sum\(\)"):
        R(hf.EWC(), hf.Diagonal(), history="sum")
    with pytest.raises(TypeError, match=r"approximation must be .*got the value EWC"):
        R(hf.EWC(), hf.EWC())
    with pytest.raises(TypeError, match=r"fn must be a function of \(outputs, batch\), got 3"):
        hf.Custom(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="include must be a tuple of patterns, got a string"):
        R(hf.EWC(), hf.Diagonal(), include="layer.*")


# ---- models and penalties ----


def test_a_model_without_trainable_parameters() -> None:
    frozen = network().requires_grad_(False)
    for model, count in ((frozen, 4), (nn.Identity(), 0)):
        message = rf"no parameter to hold: {count} parameters.*set requires_grad.*widen include="
        with pytest.raises(ValueError, match=message):
            consolidate(model=model)


def test_patterns_that_match_nothing() -> None:
    for options in ({"include": ("head.*",)}, {"exclude": ("head.*",)}):
        regularizer = hf.Regularizer(hf.EWC(), hf.Diagonal(), **options)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"no parameter matches 'head\.\*'; the model has: 0\.w"
        ):
            regularizer.consolidate(network(), [batch()], seed=0, progress=False)


@every_approximation
def test_a_penalty_on_another_model(approximation: hf.Approximation) -> None:
    penalty = consolidate(approximation)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 2)))
    for use in (penalty, penalty.add_grad_):
        with pytest.raises(ValueError, match="does not have the parameters that were") as caught:
            use(other)
        message = str(caught.value)
        assert "0.weight: expected shape" not in message  # five rows where there were four: grown
        assert "2.weight: expected shape (2, 4), the model has no such parameter" in message
        assert "2.bias: expected shape (2,), the model has no such parameter" in message
        assert "the model also has: 2.0.weight, 2.0.bias" in message
    narrow = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"0\.weight: expected shape \(4, 3\), got \(4, 2\)"):
        penalty(narrow)


def test_a_previous_penalty_that_does_not_fit_the_model() -> None:
    first = consolidate()
    narrow = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    data = [(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(ValueError, match=r"0\.weight: shape was \(4, 3\), is \(4, 2\)"):
        consolidate(model=narrow, data=data, previous=first)
    frozen = network()
    frozen[0].requires_grad_(False)  # type: ignore[index, operator]
    with pytest.raises(ValueError, match=r"0\.weight: held before, now frozen, excluded or gone"):
        consolidate(model=frozen, previous=first)


BASE: dict[str, Any] = {
    "importance": hf.EWC(),
    "approximation": hf.CountSketch(size=3),
    "history": hf.MovingAverage(new=0.5),
    "anchor": "latest",
}
OTHERS: list[tuple[str, Any]] = [
    ("importance", hf.MAS()),
    ("importance", hf.EWC(labels="predicted")),
    ("approximation", hf.CountSketch(size=4)),
    ("approximation", hf.CountSketch(size=3, copies=2)),
    ("approximation", hf.CountSketch(size=3, merge="stack")),
    ("approximation", hf.LowRank(rank=3)),
    ("history", hf.Sum()),
    ("history", hf.MovingAverage(new=0.4)),
    ("history", hf.MovingAverage(new=0.5, start="zero")),
    ("anchor", "each"),
]


@pytest.mark.parametrize(("name", "other"), OTHERS, ids=str)
def test_a_previous_penalty_of_another_recipe(name: str, other: Any) -> None:
    model = network()
    first = hf.Regularizer(**BASE).consolidate(model, [batch()], seed=0, progress=False)
    second = hf.Regularizer(**{**BASE, name: other})
    with pytest.raises(ValueError, match="previous was made by another recipe") as caught:
        second.consolidate(model, [batch()], previous=first, seed=0, progress=False)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2  # only what differs
    assert lines[1].startswith(f"  {name}: was ")
    stronger = hf.Regularizer(**BASE, strength=7.0)  # strength may differ
    after = stronger.consolidate(model, [batch()], previous=first, seed=0, progress=False)
    assert after.strength == 7.0


def test_previous_is_a_penalty() -> None:
    with pytest.raises(TypeError, match="previous must be a Penalty or None, got dict"):
        consolidate(previous={"matrix": 1})


@pytest.mark.parametrize(
    "approximation",
    [
        hf.CountSketch(size=2),
        hf.CountSketch(size=2, merge="stack"),
        hf.LowRank(2),
        hf.DenseSketch(size=2),
        hf.DenseSketch(size=2, kind="gaussian", merge="stack"),
        hf.OSNAP(size=2),
        hf.SRHT(size=2),
    ],
    ids=str,
)
def test_sketches_that_share_a_hash_are_not_merged(approximation: hf.Approximation) -> None:
    model = network()
    regularizer = hf.Regularizer(hf.EWC(), approximation)
    first = regularizer.consolidate(model, [batch()], seed=0, progress=False)
    (record,) = first.tasks
    assert record.hash_ids
    ids = "|".join(record.hash_ids)
    message = rf"hash ({ids}) is already in .*must not be merged.*use another seed"
    with pytest.raises(ValueError, match=message):
        regularizer.extend(first, model, first.matrix, record)
    # the loop with a constant seed is safe: its tasks draw their own
    second = regularizer.consolidate(model, [batch()], previous=first, seed=0, progress=False)
    assert second.tasks[0].hash_ids != second.tasks[1].hash_ids


# ---- memory ----


def available(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(memory, "available", lambda device: count)


@pytest.mark.parametrize(
    "approximation",
    [
        hf.LowRank(rank=1000),
        hf.CountSketch(size=1000),
        hf.CountSketch(size=10, copies=100),
        hf.DenseSketch(size=1000),
        hf.OSNAP(size=1000),
        hf.SRHT(size=1000),
        hf.Nystrom(size=1000),
        hf.BlockDiagonal(size=100),
        hf.Full(form="dense"),
        hf.Full(form="factored"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2, 5, 30, 95, 96, 200])
def test_what_does_not_fit_says_what_would(
    approximation: hf.Approximation, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is true: each approximation it names can be consolidated in that memory."""
    model = nn.Linear(100, 10)
    m = 1010
    setting = hf.Setting(hf.ParameterSpace.of(model), hf.hashing.Draw(0))
    needed = approximation.nbytes(setting)
    available(monkeypatch, rows * 4 * m)
    data = [(torch.randn(4, 100), torch.zeros(4, dtype=torch.int64))]
    if needed <= rows * 4 * m:
        return
    with pytest.raises(MemoryError) as caught:
        consolidate(approximation, model=model, data=data)
    message = str(caught.value)
    estimate = re.escape(f"needs {memory.readable(needed)}, {memory.readable(rows * 4 * m)} are")
    assert re.search(estimate + " free on cpu", message)
    assert repr(approximation) in message
    advised = re.findall(
        r"(LowRank|CountSketch|Diagonal)\((?:\w+=(\d+))?\)", message.split(";")[1]
    )
    assert ("Diagonal", "") in advised
    # the result, basis and buffer, of which a small rank keeps 32 rows each
    assert ("LowRank" in dict(advised)) == (rows >= 3 * 32)
    for name, number in advised:
        recipe = {"LowRank": hf.LowRank, "CountSketch": hf.CountSketch, "Diagonal": hf.Diagonal}[
            name
        ]
        fitting = recipe(int(number)) if number else recipe()
        assert fitting.nbytes(setting) <= rows * 4 * m
        if number and int(number) < m:  # and it is the largest one
            assert recipe(int(number) + 1).nbytes(setting) > rows * 4 * m


def test_not_even_a_diagonal_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 26 * 4 - 1)
    with pytest.raises(MemoryError, match=r"Diagonal\(\) needs 104 B, 103 B .*with include="):
        consolidate()
    available(monkeypatch, 26 * 4)
    consolidate()


def test_slices_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 26 * 4)  # the diagonal alone
    with pytest.raises(MemoryError, match=r"SCP\(slices=50\) needs 208 B, .*fewer slices"):
        consolidate(importance=hf.SCP())


def test_the_whole_matrix_of_a_large_model_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available(monkeypatch, 10**9)
    model = nn.Linear(1000, 1000)
    touched = []

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        touched.append(batch)
        return model(batch[0])

    data = [(torch.randn(2, 1000), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(MemoryError, match=r"Full\(form='auto'\) needs 16\.4 GB, 1 GB are free"):
        consolidate(hf.Full(), model=model, data=data, forward=forward)
    with pytest.raises(MemoryError, match=r"Full\(form='dense'\) needs 4\.01 TB"):
        consolidate(hf.Full(form="dense"), model=model, data=data, forward=forward)
    assert not touched


def test_the_estimate_of_free_memory_is_plausible() -> None:
    assert 2**20 < memory.available(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(
    ("limit", "left"), [("1000000", 1000000 - 700000 + 50000), ("600000", 0), ("max", 2**62)]
)
def test_the_limit_of_a_container_counts(limit: str, left: int, tmp_path: Path) -> None:
    assert memory._of_container(tmp_path) == 2**62
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 50000\n")
    assert memory._of_container(tmp_path) == left


def test_single_examples_are_no_batches() -> None:
    """Whatever the importance: each of their outputs would be taken for an example."""
    model, (x, y) = nn.Linear(4, 3), (torch.randn(6, 4), torch.randint(0, 3, (6,)))
    for importance in (hf.MAS(), hf.EWC()):
        for data in ([(x[i], y[i]) for i in range(6)], [(x[i], int(y[i])) for i in range(6)]):
            with pytest.raises(ValueError, match="got a single example: its label is the number"):
                hf.Regularizer(importance, hf.Diagonal()).consolidate(model, data)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bool])
def test_labels_may_be_integers_of_any_kind(dtype: torch.dtype) -> None:
    model, (x, y) = nn.Linear(4, 3), (torch.randn(6, 4), torch.randint(0, 2, (6,)))
    recipe = hf.Regularizer(hf.EWC(), hf.Diagonal())
    expected = recipe.consolidate(model, [(x, y)]).matrix.diagonal()
    found = recipe.consolidate(model, [(x, y.to(dtype))]).matrix.diagonal()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("labels", "said"), [([0, 3], "0 to 3"), ([-1, 2], "-1 to 2")])
def test_labels_without_an_output_are_refused(labels: list[int], said: str) -> None:
    recipe = hf.Regularizer(hf.EWC(), hf.Diagonal())
    with pytest.raises(ValueError, match=f"labels go from {said}, but the network has 3 outputs"):
        recipe.consolidate(nn.Linear(4, 3), [(torch.randn(2, 4), torch.tensor(labels))])


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_layers_without_a_shape_are_named() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias have no shape yet"):
        hf.Regularizer(hf.EWC(), hf.Diagonal()).consolidate(
            model, [(torch.randn(2, 4), torch.tensor([0, 1]))]
        )


def test_a_frozen_group_is_said_to_be_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    recipe = hf.Composite({"1.*": hf.LowRank(2), "*": hf.Diagonal()})
    with pytest.raises(ValueError, match="what it matches is frozen"):
        hf.Regularizer(hf.EWC(), recipe).consolidate(model, [torch.zeros(2, 4)])


def test_strengths_of_numpy() -> None:
    model = nn.Linear(4, 3)
    penalty = hf.Regularizer(hf.MAS(), hf.Diagonal()).consolidate(model, [torch.ones(2, 4)])
    assert penalty.with_strength(np.float32(3.0)).strength == 3.0
    with pytest.raises(ValueError, match="strength must be a finite number"):
        penalty.with_strength(True)


def test_recipes_take_numbers_of_numpy_and_keep_those_of_python() -> None:
    size, share = np.int32(3), np.float32(0.25)
    found = [
        hf.CountSketch(size, copies=np.int64(2)),
        hf.LowRank(size, group=np.uint8(4)),
        hf.DiagonalPlusLowRank(size, group=size),
        hf.KroneckerPlusLowRank(size),
        hf.Kronecker(rank=size),
        hf.BlockDiagonal(size),
        hf.Nystrom(size),
        hf.SRHT(size, block=np.int64(4)),
        hf.OSNAP(np.int64(4), nonzeros=np.int64(2)),
        hf.DenseSketch(size),
    ]
    assert "np." not in repr(hf.SCP(slices=size))
    for approximation in found:
        history = hf.MovingAverage(new=share)
        recipe = hf.Regularizer(hf.MAS(), approximation, np.float32(2.0), history)
        assert "np." not in repr(recipe)
        json.dumps(recipe.describe())
        penalty = recipe.consolidate(nn.Linear(4, 3), [torch.randn(9, 4)], limit=np.int64(8))
        assert type(penalty.strength) is float
        assert penalty.tasks[0].examples == 8


@pytest.mark.parametrize("size", [np.int64(0), np.float64(2.0), torch.tensor(1.5), True, "3"])
def test_what_is_no_positive_integer_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="size must be a positive integer, got"):
        hf.CountSketch(size)  # type: ignore[arg-type]
