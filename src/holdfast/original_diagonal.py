r"""The "diagonal" behind the paper's printed numbers: not that of any matrix it was compared with.

The authors' code was written for batches of one example and called with batches of 100: the outputs of a
whole minibatch are flattened to one vector, ONE softmax is taken over it, and there is one gradient per
minibatch. It is kept outside the library's approximations, to be reported beside the correct diagonal.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from holdfast.importance import EWC, MAS
from holdfast.penalty import Penalty
from holdfast.regularizer import Regularizer
from holdfast.streams import Split

__all__ = ["OriginalDiagonal"]


@dataclasses.dataclass(frozen=True)
class OriginalDiagonal:
    r"""Squared gradients of whole minibatches, :math:`\frac1N \sum_b (\nabla \varphi(z_b))^2`.

    :math:`z_b` holds all outputs of minibatch b (100 × 2 logits: a vector of 200) and
    :math:`p = \operatorname{softmax}(z_b)` runs over all of them. EWC: :math:`\varphi = -\log p_c` with c the
    arg-max of p; MAS: :math:`\varphi = \lVert p \rVert^2`.

    This is the library's own diagonal, read from other data: each "example" is a minibatch and the network's
    output for it is :math:`z_b`. So history, anchor and penalty are those of every other method.

    Attributes:
        normalise: N, the number of ``"batches"`` (the authors' code when the printed numbers were made) or
            of ``"examples"`` (their last version).
    """

    normalise: Literal["batches", "examples"] = "batches"

    def __post_init__(self) -> None:
        if self.normalise not in ("batches", "examples"):
            raise ValueError(f"unknown normalise {self.normalise!r}; known: batches, examples")

    def check(self, regularizer: Regularizer) -> None:
        """Refuse a regularizer whose fields would say something else than what is computed."""
        if regularizer.importance not in (EWC(labels="predicted"), MAS(outputs="softmax")):
            raise ValueError(
                "original_diagonal takes the arg-max label and the softmax outputs: expected the importance "
                f"EWC(labels='predicted') or MAS(outputs='softmax'), got {regularizer.importance}"
            )

    def consolidate(
        self,
        regularizer: Regularizer,
        model: nn.Module,
        split: Split,
        batch_size: int,
        *,
        order: Tensor | None = None,
        previous: Penalty | None = None,
        seed: int | None = None,
    ) -> Penalty:
        """The penalty of the original code's diagonal; arguments as for ``Regularizer.consolidate``."""
        self.check(regularizer)
        if self.normalise == "examples":
            if len(split) % batch_size:
                raise ValueError(
                    f"normalise='examples' needs full batches: {len(split)} examples are no multiple "
                    f"of the batch size {batch_size}"
                )
            # The matrix is divided by the number of its rows, which are batches; the rest is a factor.
            regularizer = dataclasses.replace(
                regularizer, strength=regularizer.strength / batch_size
            )
        return regularizer.consolidate(
            model,
            _minibatches_as_examples(split, batch_size, order),
            previous=previous,
            forward=_flattened_outputs,
            seed=seed,
            progress=False,
        )


def _minibatches_as_examples(
    split: Split, batch_size: int, order: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one example each, the example being a whole minibatch."""
    for x, y in split.batches(batch_size, order):
        yield x.unsqueeze(0), y.unsqueeze(0)


def _flattened_outputs(model: nn.Module, batch: Any) -> Tensor:
    """All outputs of each minibatch as one vector."""
    x: Tensor = batch[0]
    outputs: Tensor = model(x.flatten(0, 1))
    return outputs.reshape(x.shape[0], -1)
