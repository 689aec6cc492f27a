"""Metrics against loops over the definitions, and statistics against printed tables."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import metrics

fractions = st.floats(0, 1)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[float]]:
    tasks = draw(st.integers(2, 6))
    return draw(
        st.lists(
            st.lists(fractions, min_size=tasks, max_size=tasks), min_size=tasks, max_size=tasks
        )
    )


@given(matrices())
def test_metrics_are_their_definitions(R: list[list[float]]) -> None:
    T = len(R)
    initial = [0.5 + 0.01 * j for j in range(T)]
    alone = [1 - 0.02 * j for j in range(T)]
    average = sum(R[T - 1][j] for j in range(T)) / T
    forgotten = sum(max(R[i][j] for i in range(j, T - 1)) - R[T - 1][j] for j in range(T - 1)) / (
        T - 1
    )
    backward = sum(R[T - 1][j] - R[j][j] for j in range(T - 1)) / (T - 1)
    forward = sum(R[j - 1][j] - initial[j] for j in range(1, T)) / (T - 1)
    held_back = sum(alone[j] - R[j][j] for j in range(T)) / T
    assert metrics.average_accuracy(R) == pytest.approx(average)
    assert metrics.forgetting(R) == pytest.approx(forgotten)
    assert metrics.backward_transfer(R) == pytest.approx(backward)
    assert metrics.forward_transfer(R, initial) == pytest.approx(forward)
    assert metrics.intransigence(R, alone) == pytest.approx(held_back)


@given(matrices())
def test_what_lies_further_ahead_than_the_next_task_may_be_left_out(R: list[list[float]]) -> None:
    tested = [row[: task + 2] for task, row in enumerate(R)]
    assert metrics.average_accuracy(tested) == metrics.average_accuracy(R)
    assert metrics.backward_transfer(tested) == metrics.backward_transfer(R)
    assert metrics.intransigence(tested, R[0]) == metrics.intransigence(R, R[0])
    assert metrics.forward_transfer(tested, R[0]) == metrics.forward_transfer(R, R[0])
    assert metrics.forgetting(tested) == metrics.forgetting(R)


def test_a_worked_example() -> None:
    R = [[1.0, 0.5, 0.5], [0.8, 0.9, 0.6], [0.6, 0.7, 1.0]]
    assert metrics.average_accuracy(R) == pytest.approx(2.3 / 3)
    assert metrics.forgetting(R) == pytest.approx((0.4 + 0.2) / 2)
    assert metrics.backward_transfer(R) == pytest.approx((-0.4 - 0.2) / 2)
    assert metrics.forward_transfer(R, [0.5, 0.5, 0.5]) == pytest.approx((0.0 + 0.1) / 2)
    assert metrics.intransigence(R, [1.0, 1.0, 1.0]) == pytest.approx(0.1 / 3)


def test_one_task_has_no_past() -> None:
    assert metrics.average_accuracy([[0.9]]) == pytest.approx(0.9)
    assert math.isnan(metrics.forgetting([[0.9]]))
    assert math.isnan(metrics.backward_transfer([[0.9]]))
    assert math.isnan(metrics.forward_transfer([[0.9]], [0.5]))
    assert metrics.intransigence([[0.9]], [1.0]) == pytest.approx(0.1)


def test_wrong_shapes_are_refused() -> None:
    for wrong in ([0.5, 0.5], [[0.5, 0.5]], np.zeros((0, 0)), [[0.5, 0.5], [0.5]]):
        with pytest.raises(ValueError, match="square accuracy matrix"):
            metrics.average_accuracy(wrong)
    with pytest.raises(ValueError, match="initial: expected one accuracy per task, 2"):
        metrics.forward_transfer([[1, 0], [0, 1]], [0.5])
    with pytest.raises(ValueError, match="alone: expected one accuracy per task"):
        metrics.intransigence([[1, 0], [0, 1]], [[1, 1]])


def test_the_curve_is_the_mean_over_seen_tasks_after_every_epoch() -> None:
    accuracy = [[[0.5], [1.0]], [[1.0, 0.5], [0.5, 0.7]]]
    assert metrics.accuracy_curve(accuracy) == pytest.approx([0.5, 1.0, 0.75, 0.6])


@pytest.mark.parametrize(
    ("probability", "degrees", "printed"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.30265273),
        (0.975, 4, 2.77644511),
        (0.975, 19, 2.09302405),
        (0.95, 10, 1.81246112),
        (0.995, 30, 2.74999565),
        (0.975, 1000, 1.96233908),
        (0.025, 4, -2.77644511),
    ],
)
def test_student_quantiles_are_those_of_the_tables(
    probability: float, degrees: int, printed: float
) -> None:
    assert metrics.student_quantile(probability, degrees) == pytest.approx(printed, rel=1e-8)


@given(st.floats(-50, 50), st.sampled_from([1, 2, 3]))
def test_student_distribution_has_its_closed_forms(t: float, degrees: int) -> None:
    closed = {
        1: 0.5 + math.atan(t) / math.pi,
        2: 0.5 + t / (2 * math.sqrt(2 + t * t)),
        3: 0.5 + (t / math.sqrt(3) / (1 + t * t / 3) + math.atan(t / math.sqrt(3))) / math.pi,
    }
    assert metrics.student_distribution(t, degrees) == pytest.approx(closed[degrees], abs=1e-10)


def test_summary_of_five_seeds() -> None:
    values = [0.90, 0.80, 0.95, 0.85, 0.75]
    s = metrics.summarise(values)
    deviation = math.sqrt(sum((v - 0.85) ** 2 for v in values) / 4)
    assert (s.mean, s.std, s.count) == (pytest.approx(0.85), pytest.approx(deviation), 5)
    half = 2.776445105 * deviation / math.sqrt(5)
    assert (s.low, s.high) == (pytest.approx(0.85 - half), pytest.approx(0.85 + half))
    population = metrics.summarise(values, ddof=0)
    assert population.std == pytest.approx(deviation * math.sqrt(4 / 5))
    assert (population.low, population.high) == (s.low, s.high)


def test_one_seed_has_no_spread_and_none_is_refused() -> None:
    s = metrics.summarise([0.5])
    assert s.mean == 0.5
    assert all(map(math.isnan, (s.std, s.low, s.high)))
    with pytest.raises(ValueError, match="got none"):
        metrics.summarise([])


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (500, 5))
    covered = sum(s.low <= 3.0 <= s.high for s in map(metrics.summarise, draws))
    assert abs(covered / 500 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 500)


def test_paired_differences_are_of_the_differences() -> None:
    # the example of Student (1908), hours of sleep gained by two drugs; t = −4.0621, p = 0.002833
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    d = metrics.paired_difference(first, second)
    assert d.mean == pytest.approx(-1.58)
    assert d.p == pytest.approx(0.00283289, rel=1e-5)
    assert (d.low, d.high) == (pytest.approx(-2.4598858), pytest.approx(-0.7001142))
    turned = metrics.paired_difference(second, first)
    assert (turned.mean, turned.p) == (-d.mean, pytest.approx(d.p))


def test_paired_differences_at_the_edges() -> None:
    assert metrics.paired_difference([1, 2], [1, 2]).p == 1.0
    assert metrics.paired_difference([1, 2], [0, 1]).p == 0.0
    assert math.isnan(metrics.paired_difference([1], [0]).p)
    with pytest.raises(ValueError, match="same seeds in both, got 2 and 3"):
        metrics.paired_difference([1, 2], [1, 2, 3])
