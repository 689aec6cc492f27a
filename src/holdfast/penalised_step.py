r"""A step of Adam with a penalty; for sketches and low rank, in one read of the factor.

The gradient of a penalty is :math:`\lambda F^\top u` with :math:`u = F(\theta - \theta_0)`: the first
column of it needs all of u, and u needs all of F, so that F is read twice. But u can be kept from step to
step. While a block of columns is in the cache, it gives its part of the gradient, its parameters are stepped,
and it adds its part of :math:`F(\theta' - \theta)` to the u of the next step: F is read once. Where a factor
is one summand of several, the others add their gradient first.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from holdfast import kernels
from holdfast.adam import BETA1, BETA2, EPSILON, FlatAdam
from holdfast.matrices import FactoredMatrix, Offset, PSDMatrix, SumMatrix
from holdfast.penalty import Penalty

__all__ = ["Pull", "Step", "penalised"]

Step = Callable[[], object]


class Pull(Protocol):
    """What training asks of a penalty: to add its gradient to every ``.grad``."""

    def add_grad_(self, model: nn.Module) -> Tensor:
        """Add the gradient at the model's parameters, return the penalty's value."""


def penalised(model: nn.Module, penalty: Pull | None, optimizer: FlatAdam) -> Callable[[], Step]:
    """Gives the function that steps every parameter from its gradient and the penalty's.

    It is asked for anew whenever something else has changed the parameters, and at every epoch, which
    keeps rounding errors from adding up and makes a run that is resumed there equal to one that is not.
    """
    if penalty is None:
        return lambda: optimizer.step
    if isinstance(penalty, Penalty):
        penalty.space.tensors(model)  # refuses a penalty of another network
    flat = optimizer.flat
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if (
        flat is None
        or type(penalty) is not Penalty
        or list(penalty.space.names) != names
        or penalty.anchor.shape != flat.shape
        or penalty.anchor.dtype != flat.dtype
        or penalty.anchor.device != flat.device
    ):
        return lambda: _in_pieces(model, penalty, optimizer)
    summands = _summands(penalty)
    for place, (matrix, _) in enumerate(summands):
        if isinstance(matrix, FactoredMatrix) and kernels.steps(matrix.rows, flat):
            others = [*summands[:place], *summands[place + 1 :]]
            return lambda: _FusedStep(summands[place], others, penalty, optimizer, flat)
    return lambda: _on_flat_vector(penalty, optimizer, flat)


class _Summand(NamedTuple):
    """A matrix with its own offset."""

    matrix: PSDMatrix
    offset: Offset


def _summands(penalty: Penalty) -> list[_Summand]:
    """The matrices that add up to the penalty's."""
    matrix = penalty.matrix
    if not isinstance(matrix, SumMatrix):
        return [_Summand(matrix, penalty.offset)]
    return list(
        itertools.starmap(_Summand, zip(matrix.parts, matrix.offsets(penalty.offset), strict=True))
    )


def _in_pieces(model: nn.Module, penalty: Pull, optimizer: FlatAdam) -> Step:
    """Any penalty."""

    def step() -> None:
        penalty.add_grad_(model)
        optimizer.step()

    return step


def _on_flat_vector(penalty: Penalty, optimizer: FlatAdam, flat: nn.Parameter) -> Step:
    """A penalty that holds all of the flat vector, in its order."""
    matrix, anchor, offset, strength = (
        penalty.matrix,
        penalty.anchor,
        penalty.offset,
        penalty.strength,
    )
    point, gradient = flat.detach(), flat.grad
    assert gradient is not None

    def step() -> None:
        _, product = matrix.value_and_product(point - anchor, offset)
        gradient.add_(product, alpha=strength)
        optimizer.step()

    return step


class _FusedStep:
    """The compiled step; see the top of this file."""

    def __init__(
        self,
        factored: _Summand,
        others: Sequence[_Summand],
        penalty: Penalty,
        optimizer: FlatAdam,
        flat: nn.Parameter,
    ) -> None:
        matrix, offset = factored
        assert isinstance(matrix, FactoredMatrix)
        self._rows, self._scale = matrix.rows, matrix.scale
        self._others, self._anchor = others, penalty.anchor
        self._strength, self._optimizer = penalty.strength, optimizer
        self._point, self._gradient = flat.detach(), flat.grad
        # In float64, so that what a thousand steps add keeps its digits.
        self._u = matrix.evaluate([self._point - self._anchor], offset)[1].double()

    def __call__(self) -> None:
        assert self._gradient is not None
        if self._others:
            delta = [self._point - self._anchor]
            for matrix, offset in self._others:
                _, half = matrix.evaluate(delta, offset)
                matrix.add_product_([self._gradient], half, self._strength)
        state = self._optimizer.advance()[0]
        count = float(state["step"])
        u = self._u if self._scale is None else self._u * self._scale
        moved = kernels.adam_step_(
            self._rows,
            (self._strength * u).float(),
            self._point,
            self._gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            kernels.AdamConstants(
                new1=1 - BETA1,
                new2=1 - BETA2,
                step_size=self._optimizer.lr / (1 - BETA1**count),
                root=(1 - BETA2**count) ** 0.5,
                epsilon=EPSILON,
            ),
        )
        self._u += moved if self._scale is None else moved * self._scale
