r"""Is the approximation good, and is the penalty strong enough? Measured, not guessed."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import losses
from holdfast.analysis import largest_eigenvalue
from holdfast.batches import forward as default_forward
from holdfast.batches import has_labels, move
from holdfast.configuration import from_json, positive
from holdfast.hashing import Draw, checked_seed
from holdfast.history import History
from holdfast.importance import Importance, Loss
from holdfast.parameters import ParameterSpace, unwrap
from holdfast.penalty import Penalty
from holdfast.preservation import preserved
from holdfast.rows import Rows

__all__ = ["Diagnosis", "diagnose"]

_Z = 1.96  # normal quantile of a two-sided 95 % interval
_STEP = 0.01  # length of the trial step, as a share of the norm of the parameters
_PROBES = 16  # random directions in which the quadratic form is compared


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` measured; print it.

    Attributes:
        examples: Held-out examples read.
        trace: Of Ω̂.
        stable_rank: tr Ω̂/λ₁.
        largest_eigenvalue: λ₁ of Ω̂.
        importance_per_layer: The share of the trace that lies in each module.
        quadratic_error: Relative error of vᵀΩ̂v against held-out rows, a mean over random directions;
            None where the rows of earlier tasks are gone.
        quadratic_interval: Its 95 % interval.
        advised_size: The CountSketch size whose expected relative Frobenius error is ``target``.
        target: The error asked for.
        loss: Mean loss on the new data at the model.
        penalty: The penalty at the model.
        suggested_strength: λ at which penalty and loss gradients have equal norm after a step of 1 %
            of the parameters' norm along the new task's gradient.
    """

    examples: int
    trace: float
    stable_rank: float
    largest_eigenvalue: float
    importance_per_layer: Mapping[str, float]
    quadratic_error: float | None
    quadratic_interval: tuple[float, float] | None
    advised_size: int
    target: float
    loss: float
    penalty: float
    suggested_strength: float

    def stability_limit(self, lr: float) -> float:
        """The strength above which plain SGD with this learning rate diverges: 2/(lr·λ₁)."""
        return 2 / (lr * self.largest_eigenvalue) if self.largest_eigenvalue else math.inf

    def __str__(self) -> str:
        error = "not measurable: the rows of earlier tasks are gone"
        if self.quadratic_error is not None and self.quadratic_interval is not None:
            low, high = self.quadratic_interval
            error = f"{self.quadratic_error:+.1%}  (95 %: {low:+.1%} … {high:+.1%})"
        largest = sorted(self.importance_per_layer.items(), key=lambda item: -item[1])[:8]
        lines = [
            f"trace                {self.trace:.4g}",
            f"stable rank          {self.stable_rank:.3g}",
            f"largest eigenvalue   {self.largest_eigenvalue:.4g}",
            f"error of vᵀΩ̂v        {error}",
            f"advised sketch size  {self.advised_size} for {self.target:.0%} Frobenius error",
            f"loss / penalty       {self.loss:.4g} / {self.penalty:.4g}",
            f"strength to try      {self.suggested_strength:.3g}"
            f"  (plain SGD at lr 0.01 diverges above {self.stability_limit(0.01):.3g})",
            "importance           " + ", ".join(f"{n or '(root)'} {s:.0%}" for n, s in largest),
        ]
        return "\n".join(lines)


def diagnose(
    penalty: Penalty,
    model: nn.Module,
    data: Iterable[Any],
    *,
    new: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss: Loss | None = None,
    importance: Importance | None = None,
    target: float = 0.1,
    limit: int = 1000,
    seed: int = 0,
) -> Diagnosis:
    """Compare a penalty with held-out rows of its task, and its strength with a new task's loss.

    Args:
        penalty: What :meth:`Regularizer.consolidate` returned.
        model: The network; it comes back bit-identical.
        data: Held-out batches of the task consolidated last; rows are taken at its θ*.
        new: Batches of the task to be learned next; by default ``data``. Read up to ``limit``.
        forward: As for ``consolidate``.
        loss: As for ``consolidate``; it is also the training loss of the new task.
        importance: The rule, where the penalty was made with :class:`Custom`.
        target: The relative Frobenius error for which a sketch size is advised.
        limit: The number of examples to read.
        seed: For the random directions.
    """
    if not 0 < target < 1:
        raise ValueError(f"target must lie in (0, 1), got {target}")
    limit = positive("limit", limit)
    seed = checked_seed(seed)
    if importance is None:
        rule = penalty.recipe.get("importance", {})
        if rule.get("name") not in ("ewc", "mas", "scp"):
            raise ValueError("the penalty was made with a rule of one's own; pass importance=")
        importance = from_json(Importance, rule)
    batches = list(_take(data, limit))
    fresh = list(_take(new, limit)) if new is not None else batches
    inner = unwrap(model)
    space = penalty.space
    device = space.tensors(inner)[0].device
    here = penalty._on(device)
    with preserved(inner, device), _trainable(space.parameters(inner)):
        value = float(here(inner).detach())
        mean, _ = _loss_gradient(inner, space, fresh, forward, loss)
        with _at(inner, space, here.anchor):
            W = _rows(inner, batches, space, importance, forward, loss, limit, seed)
            strength = _equal_norm_strength(here, inner, fresh, forward, loss)
        diagonal = here.matrix.diagonal()
        trace, largest = float(diagonal.double().sum()), largest_eigenvalue(here.matrix)
        error, interval = _quadratic_error(here, W, seed)
        size = _advised_size(W, target)
    shares = {
        name: float(diagonal[a:b].sum()) / trace if trace else 0.0
        for name, (a, b) in space.layers.items()
    }
    return Diagnosis(
        examples=len(W),
        trace=trace,
        stable_rank=trace / largest if largest else math.nan,
        largest_eigenvalue=largest,
        importance_per_layer=shares,
        quadratic_error=error,
        quadratic_interval=interval,
        advised_size=size,
        target=target,
        loss=mean,
        penalty=value,
        suggested_strength=strength,
    )


def _take(data: Iterable[Any], limit: int) -> Iterator[Any]:
    """Batches until ``limit`` examples are there, as far as their sizes can be told."""
    from holdfast.batches import size

    seen = 0
    for batch in data:
        yield batch
        seen += size(batch) or 1
        if seen >= limit:
            return


@contextlib.contextmanager
def _trainable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Held parameters have rows, also where they have been frozen since they were consolidated."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def _at(model: nn.Module, space: ParameterSpace, vector: Tensor) -> Iterator[None]:
    """The model with its held parameters set to ``vector``, for a while."""
    tensors = [t.detach() for t in space.tensors(model)]
    before = [t.clone() for t in tensors]
    try:
        for tensor, piece in zip(tensors, space.split(vector), strict=True):
            tensor.copy_(piece)
        yield
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)


def _rows(
    model: nn.Module,
    data: list[Any],
    space: ParameterSpace,
    importance: Importance,
    forward: Callable[[nn.Module, Any], Any] | None,
    loss: Loss | None,
    limit: int,
    seed: int,
) -> Tensor:
    """Held-out rows, scaled by 1/√n so that WᵀW is Ω."""
    rows = Rows(
        model, data, space, importance, Draw(seed), forward=forward, loss=loss, limit=limit
    )
    W = torch.cat([block for batch in rows for block in batch.blocks()])
    return W / rows.divisor**0.5


def _loss_gradient(
    model: nn.Module,
    space: ParameterSpace,
    data: list[Any],
    forward: Callable[[nn.Module, Any], Any] | None,
    loss: Loss | None,
) -> tuple[float, Tensor]:
    """Mean loss over the data and its gradient, flat."""
    parameters = space.parameters(model)
    device = parameters[0].device
    total, count = 0.0, 0
    for raw in data:
        batch = move(raw, device)
        each = _losses(model, batch, forward, loss)
        torch.autograd.backward(each.sum())
        total, count = total + float(each.detach().sum()), count + len(each)
    if not count:
        raise ValueError("the data is empty: expected at least one batch with one example")
    pieces = []
    for parameter, shape in zip(parameters, space.shapes, strict=True):
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        pieces.append((grad[: shape[0]] if shape else grad).float() / count)
    for parameter in model.parameters():
        parameter.grad = None
    return total / count, space.flatten(pieces)


def _losses(
    model: nn.Module,
    batch: Any,
    forward: Callable[[nn.Module, Any], Any] | None,
    loss: Loss | None,
) -> Tensor:
    """The training loss of each example."""
    outputs = (forward or default_forward)(model, batch)
    if loss is None and not has_labels(batch):
        raise ValueError(
            "diagnose compares the penalty with a training loss, and the batch has no labels; pass "
            "new= with labelled batches of the next task, or loss=(outputs, batch) -> (B,)"
        )
    each = (loss or losses.default)(outputs, batch)
    if each.dim() != 1:
        raise ValueError(
            f"expected one loss per example, shape (B,), got {tuple(each.shape)}; a batch mean is "
            "not enough: use reduction='none'"
        )
    return each


def _equal_norm_strength(
    penalty: Penalty,
    model: nn.Module,
    data: list[Any],
    forward: Callable[[nn.Module, Any], Any] | None,
    loss: Loss | None,
) -> float:
    _, gradient = _loss_gradient(model, penalty.space, data, forward, loss)
    norm = float(gradient.norm())
    if norm == 0:
        return math.nan
    step = -(_STEP * float(penalty.anchor.norm()) / norm) * gradient.to(penalty.anchor.dtype)
    with _at(model, penalty.space, penalty.anchor + step):
        _, after = _loss_gradient(model, penalty.space, data, forward, loss)
    pull = penalty.matrix.value_and_product(step, penalty.offset)[1]
    return float(after.norm()) / float(pull.norm()) if float(pull.norm()) else math.inf


def _quadratic_error(
    penalty: Penalty, W: Tensor, seed: int
) -> tuple[float | None, tuple[float, float] | None]:
    """Relative error of vᵀΩ̂v, averaged over random directions, from the held-out rows."""
    if len(penalty.tasks) > 1 or len(W) < 2:
        return None, None
    weight = 1.0
    if "history" in penalty.recipe:
        weight = from_json(History, penalty.recipe["history"]).weights(0)[1]
    draw = Draw(seed).generator("probes")
    ratios, variances = [], []
    for _ in range(_PROBES):
        v = torch.from_numpy(draw.standard_normal(W.shape[1])).to(W)
        squares = weight * len(W) * (W @ v).square()  # their mean is vᵀΩv
        exact = float(squares.mean())
        if exact == 0:
            return None, None
        ratio = float(penalty.matrix.quadratic(v)) / exact
        ratios.append(ratio)
        variances.append((ratio * float(squares.std()) / exact) ** 2 / len(W))
    mean = sum(ratios) / len(ratios)
    between = sum((r - mean) ** 2 for r in ratios) / (len(ratios) - 1) / len(ratios)
    # the same rows serve every direction, so their errors do not average out
    spread = _Z * math.sqrt(between + sum(variances) / len(variances))
    return mean - 1, (mean - 1 - spread, mean - 1 + spread)


def _advised_size(W: Tensor, target: float) -> int:
    r"""The sketch size of a target error.

    .. math:: \frac1t\left[(\mathrm{tr}\,\Omega)^2 + \lVert\Omega\rVert_F^2 - 2\sum\lVert a_i\rVert^4\right]
        = \epsilon^2 \lVert\Omega\rVert_F^2
    """
    gram = (W.double() @ W.double().T).square()
    frobenius, quartic = float(gram.sum()), float(gram.diagonal().sum())
    trace = float(W.double().square().sum())
    if frobenius == 0:
        return 1
    return max(1, math.ceil((trace**2 + frobenius - 2 * quartic) / (target**2 * frobenius)))
