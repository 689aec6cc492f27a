"""Parameters whose gradient is rounding: terms that cancel hide nothing, and prove nothing."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
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


class Shifted(nn.Module):
    """A number that is added to all outputs: softmax does not see it, its gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(20, 7), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


@pytest.mark.parametrize("approximation", [hf.Diagonal(), hf.CountSketch(5), hf.Kronecker()])
def test_a_gradient_of_rounding_is_no_proof_of_a_hidden_road(
    approximation: hf.Approximation,
) -> None:
    torch.manual_seed(0)
    model = Shifted()
    data = [(torch.randn(32, 20), torch.randint(0, 7, (32,))) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hf.Regularizer(hf.EWC(), approximation).consolidate(model, data, seed=0)
    assert float(found.matrix.diagonal()[0]) < 1e-10 * float(found.matrix.trace())
