"""Networks are built from a seed, and leave the global generator alone."""

import pytest
import torch

from holdfast.configuration import from_json, to_json
from holdfast.models import MLP, MODELS, Model, mlp


def test_the_toy_network_has_8770_parameters() -> None:
    model = mlp((2, 128, 64, 2))
    assert sum(p.numel() for p in model.parameters()) == 8770
    assert [type(layer).__name__ for layer in model] == [
        "Linear",
        "ReLU",
        "Linear",
        "ReLU",
        "Linear",
    ]
    assert model(torch.zeros(3, 2)).shape == (3, 2)


def test_without_bias_as_in_permuted_mnist() -> None:
    model = mlp((784, 1024, 512, 256, 10), bias=False)
    assert sum(p.numel() for p in model.parameters()) == 1_460_736


def test_xavier_fills_the_stated_interval_and_zeroes_biases() -> None:
    layer = mlp((60, 40), init="xavier")[0]
    bound = (6 / 100) ** 0.5
    assert layer.weight.abs().max() <= bound
    assert layer.weight.abs().max() > 0.98 * bound
    assert layer.weight.abs().max() > mlp((60, 40))[0].weight.abs().max() * 1.2  # not the default
    assert not layer.bias.any()


def test_a_seed_gives_the_same_weights_and_the_global_generator_is_left_alone() -> None:
    recipe = MLP((2, 5, 2))
    state = torch.get_rng_state()
    a, b, c = (recipe.build(seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a[0].weight, b[0].weight)
    assert not torch.equal(a[0].weight, c[0].weight)


def test_models_come_back_from_json() -> None:
    recipe = MLP((2, 5, 2), bias=False, init="xavier")
    data = to_json(recipe)
    assert data == {"name": "mlp", "sizes": [2, 5, 2], "bias": False, "init": "xavier"}
    assert from_json(Model, data) == recipe
    assert MODELS["mlp"] is MLP


@pytest.mark.parametrize("sizes", [(2,), (), (2, 0, 2), (-1, 2)])
def test_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="widths from input to output"):
        mlp(sizes)


def test_unknown_init_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown init 'he'; known: default, xavier"):
        mlp((2, 2), init="he")  # type: ignore[arg-type]
