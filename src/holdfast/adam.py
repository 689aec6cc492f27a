"""Adam over one flat vector: one kernel per step, and one vector for a penalty."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["BETA1", "BETA2", "EPSILON", "FlatAdam"]

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # PyTorch's defaults


class FlatAdam:
    """Adam over all trainable parameters of a model, laid out as views of one flat vector.

    The parameters keep their identity, shape and values; only their storage becomes shared. Arithmetic
    and result are those of ``torch.optim.Adam``, with one difference: a parameter that a step did not
    use has gradient zero, not ``None``, and so still moves by its momentum.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]  # tied ones come once
        if not parameters:
            raise ValueError("the model has no trainable parameter; set requires_grad on some")
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._flats = [_flatten(group) for group in groups.values()]
        self.lr = lr
        self._state: list[dict[str, Tensor]] = []

    def state(self) -> dict[str, Tensor]:
        """The moments and the step count, empty before the first step."""
        return {
            f"{index}.{name}": tensor
            for index, state in enumerate(self._state)
            for name, tensor in state.items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` returned."""
        self._state = [{} for _ in self._flats] if state else []
        for key, tensor in state.items():
            index, _, name = key.partition(".")
            self._state[int(index)][name] = tensor.clone()

    def reset(self) -> None:
        """Forget the moments and the step count, as a newly made optimiser would."""
        self._state = []

    def advance(self) -> list[dict[str, Tensor]]:
        """Count a step; the state of every flat vector, its step counted and its moments as before."""
        if not self._state:
            self._state = [_moments(flat) for flat in self._flats]
        for state in self._state:
            state["step"].add_(1)
        return self._state

    def step(self) -> None:
        """Update every parameter from its gradient."""
        for flat, state in zip(self._flats, self.advance(), strict=True):
            # What torch.optim.Adam(fused=True) calls, without its 0.1 ms of bookkeeping per step.
            torch._fused_adam_(
                [flat.detach()],
                [_gradient(flat)],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                lr=self.lr,
                beta1=BETA1,
                beta2=BETA2,
                weight_decay=0.0,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )

    @property
    def flat(self) -> nn.Parameter | None:
        """The flat vector, with its gradient, if there is only one."""
        return self._flats[0] if len(self._flats) == 1 else None

    def finite(self) -> bool:
        """Whether every parameter is a finite number."""
        return all(bool(torch.isfinite(flat).all()) for flat in self._flats)


def _moments(flat: Tensor) -> dict[str, Tensor]:
    """The state of Adam before its first step, named as in ``torch.optim.Adam``."""
    zero = torch.zeros_like(flat, requires_grad=False)
    step = torch.zeros((), dtype=torch.float32, device=flat.device)
    return {"step": step, "exp_avg": zero, "exp_avg_sq": zero.clone()}


def _gradient(flat: Tensor) -> Tensor:
    """The gradient that :func:`_flatten` made."""
    assert flat.grad is not None
    return flat.grad


@torch.no_grad()
def _flatten(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One flat parameter with a gradient, of which the given ones become views."""
    flat = nn.Parameter(torch.cat([p.reshape(-1) for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for parameter in parameters:
        piece = slice(start, start + parameter.numel())
        parameter.data = flat.data[piece].view_as(parameter)
        parameter.grad = flat.grad[piece].view_as(parameter)
        start = piece.stop
    return flat
