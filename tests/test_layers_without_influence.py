"""Parameters whose gradient is rounding: terms that cancel hide nothing, and prove nothing."""

import pytest
import torch
from torch import Tensor

from test_layers import READ, Attention, examples, sites


@pytest.mark.parametrize(
    "name", ["key bias", "bias before group norm", "bias before instance norm"]
)
def test_a_bias_without_influence_leaves_its_layer_readable(name: str) -> None:
    """Its gradient is rounding, and other rounding by the other road: in single precision too."""
    build, shape = READ[name]
    torch.manual_seed(1)
    x, y = examples(shape, 9)
    certain, candidates = sites(build().float(), (x.float(), y))
    assert certain == candidates > 0


class Borrowed(Attention):
    """The keys' layer sees positions first: its bias has no influence, and its weight is misread."""

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(x.transpose(0, 1)).transpose(0, 1)
        scores = self.query(x) @ keys.mT
        return self.head((scores.softmax(-1) @ self.value(x)).tanh().mean(1))


@pytest.mark.filterwarnings("ignore::holdfast.gradients.VectorisationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("frozen", [False, True])
def test_rounding_alone_proves_nothing(frozen: bool, dtype: torch.dtype) -> None:
    """Neither for a layer that is read wrongly, nor where the bias is all that is held."""
    torch.manual_seed(1)
    model = (Attention(7) if frozen else Borrowed(7)).to(dtype)
    model.key.weight.requires_grad_(not frozen)
    x, y = torch.randn(2, 2, 7, dtype=dtype), torch.tensor([0, 1])
    certain, candidates = sites(model, (x, y))
    assert (certain, candidates) == (3, 4)
