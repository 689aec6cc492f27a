"""Running an experiment: deterministic, complete, and true to its fields."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import results
from holdfast.adam import FlatAdam
from holdfast.execution import check_network, execute
from holdfast.experiment import Experiment
from holdfast.models import MLP, MultiHeadMLP
from holdfast.seeds import derive
from holdfast.streams import SplitMNIST, Toy, join
from holdfast.training import Training, accuracies, learn


def experiment(**changes: Any) -> Experiment:
    base = Experiment(
        "toy",
        "paper",
        Toy(length=3, train=60, validation=40, test=50),
        MLP((2, 16, 2)),
        Training(epochs=3, batch_size=20, lr=0.01),
        hf.Regularizer(hf.EWC(), hf.CountSketch(8), strength=10.0),
    )
    return dataclasses.replace(base, **changes)


def numbers(result: results.Result) -> tuple[Any, ...]:
    return result.accuracy, result.validation, result.test, result.initial


def test_a_run_is_complete_and_can_be_saved(tmp_path: Any) -> None:
    result = execute(experiment())
    assert results.load(result.save(tmp_path)) == result
    assert [len(epochs) for epochs in result.accuracy] == [3, 3, 3]
    for task in range(3):
        assert result.accuracy[task][-1] == result.test[task][: task + 1]
    assert all(50 * a == pytest.approx(round(50 * a)) for a in result.test[-1])
    assert result.seconds["total"] >= result.seconds["training"] > 0
    assert result.seconds["consolidation"] > 0
    # a factor of 8 rows and the anchor
    assert result.floats_per_parameter == pytest.approx(9)
    assert result.penalty_bytes == 9 * 4 * 82


def test_a_long_stream_is_tested_on_what_was_seen_and_the_next_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = execute(experiment())
    monkeypatch.setattr("holdfast.execution.AHEAD", 3)  # as long as the stream: not yet
    assert execute(experiment()).test == whole.test
    monkeypatch.setattr("holdfast.execution.AHEAD", 2)
    result = execute(experiment())
    assert result.test == [whole.test[0][:2], whole.test[1], whole.test[2]]
    assert (result.accuracy, result.validation) == (whole.accuracy, whole.validation)
    assert results.load(result.save(tmp_path)) == result


def test_a_search_never_sees_test_data(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends with the network, and so the validation accuracies, of the run that is tested."""
    tested = execute(experiment())

    def missing(*arguments: Any) -> Any:
        task = tasks(*arguments)
        return [dataclasses.replace(t, test=None) for t in task]

    tasks = Toy.tasks
    monkeypatch.setattr(Toy, "tasks", missing)
    monkeypatch.setattr("holdfast.execution._check_network", lambda *_: None)
    result = execute(experiment(role="tune"), folder=tmp_path, patience=0.0)
    assert result.validation == tested.validation
    assert len(result.validation) == 1
    assert (result.accuracy, result.test, result.initial) == ([], [], [])
    assert results.load(result.save(tmp_path)) == result
    assert result.outcome == f"{sum(result.validation[0]) / 3:.1%} on validation data"
    assert result.tasks == tested.tasks == 3


def test_a_stopped_search_goes_on(tmp_path: Any) -> None:
    class Stop(Exception):
        pass

    def stop(fraction: float) -> None:
        if fraction > 0.7:
            raise Stop

    search = experiment(role="tune")
    with pytest.raises(Stop):
        execute(search, folder=tmp_path, patience=0.0, progress=stop)
    again = execute(search, folder=tmp_path)
    assert numbers(again) == numbers(execute(search))
    # what a search leaves of the first task lacks the test accuracies: a tested run begins anew
    assert numbers(execute(experiment(), folder=tmp_path)) == numbers(execute(experiment()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": "joint", "regularizer": None},
        {"role": "single", "regularizer": None},
        {"regularizer": hf.Regularizer(hf.EWC(labels="sampled"), hf.LowRank(2))},
    ],
)
def test_the_same_experiment_gives_the_same_bits(changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    first = execute(experiment(**changes))
    torch.manual_seed(2)
    second = execute(experiment(**changes))
    assert numbers(first) == numbers(second)
    other = execute(experiment(seed=1, **changes))
    assert numbers(first) != numbers(other)


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    execute(experiment())
    assert torch.equal(torch.get_rng_state(), state)


def test_methods_share_data_weights_and_order() -> None:
    with_penalty, without = execute(experiment()), execute(experiment(regularizer=None))
    assert with_penalty.initial == without.initial
    assert with_penalty.accuracy[0] == without.accuracy[0]  # the first task has no penalty yet
    assert without.penalty_bytes == 0


def test_the_penalty_acts_from_the_second_task_on() -> None:
    free = execute(experiment(regularizer=None))
    zero = execute(experiment(regularizer=hf.Regularizer(hf.EWC(), hf.Full(), strength=0.0)))
    held = execute(experiment(regularizer=hf.Regularizer(hf.EWC(), hf.Full(), strength=1e4)))
    assert numbers(zero) == numbers(free)
    assert held.accuracy[0] == free.accuracy[0]
    assert held.accuracy[1] != free.accuracy[1]


def test_single_runs_start_afresh_for_every_task() -> None:
    spec = experiment(role="single", regularizer=None)
    result = execute(spec)
    tasks = spec.stream.tasks(derive(spec.seed, "data"))
    model = spec.model.build(spec.seed)
    learn(
        model,
        tasks[1].train,
        spec.training,
        FlatAdam(model, spec.training.lr),
        generator=torch.Generator().manual_seed(derive(spec.seed, "order", 1)),
    )
    assert result.test[1] == accuracies(model, [task.test for task in tasks])
    assert result.test[0] == execute(experiment(regularizer=None)).test[0]


def test_joint_runs_train_on_all_tasks_so_far() -> None:
    spec = experiment(mode="joint", regularizer=None)
    result = execute(spec)
    tasks = spec.stream.tasks(derive(spec.seed, "data"))
    model = spec.model.build(spec.seed)
    optimizer = FlatAdam(model, spec.training.lr)
    for index in range(2):
        learn(
            model,
            join([task.train for task in tasks[: index + 1]]),
            spec.training,
            optimizer,
            generator=torch.Generator().manual_seed(derive(spec.seed, "order", index)),
        )
    assert result.test[1] == accuracies(model, [task.test for task in tasks])


def test_progress_rises_to_one_and_the_network_is_shown_after_every_task() -> None:
    seen: list[float] = []
    networks: list[nn.Module] = []
    execute(experiment(), progress=seen.append, after_task=networks.append)
    assert seen == sorted(seen)
    assert len(seen) == 9
    assert seen[-1] == 1.0
    assert len(networks) == 3


def test_a_diverging_run_is_an_error() -> None:
    with pytest.raises(FloatingPointError, match="diverged"):
        execute(experiment(training=Training(epochs=1, batch_size=10, lr=1e38)))


def test_a_network_that_cannot_answer_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.execution.learn", lambda *_, **__: pytest.fail("it was trained"))
    digits = SplitMNIST(source="generated", validation=100)
    heads = dataclasses.replace(digits, head="multi")
    cases = [
        (Toy(), MLP((3, 4, 2)), "cannot answer task 1, whose inputs are 2: "),
        (Toy(), MLP((2, 4, 1)), r"has 1 outputs, but labels of task 1 go up to 1.*at least 2 out"),
        (
            digits,
            MLP((784, 4, 8)),
            r"MLP\(sizes=\(784, 4, 8\).* has 8 outputs.* 8 or 9 go up to 9",
        ),
        (heads, MultiHeadMLP((784, 4, 2), heads=4), "cannot answer 8 or 9, whose inputs are 785"),
    ]
    for stream, model, message in cases:
        spec = experiment(stream=stream, model=model)
        for refuse in (check_network, execute):
            with pytest.raises(ValueError, match=message):
                refuse(spec)
    check_network(experiment(stream=heads, model=MultiHeadMLP((784, 4, 2), heads=5)))
