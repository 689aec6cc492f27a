"""A network that is looked at and comes back bit-identical."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

__all__ = ["preserved"]


@contextlib.contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode with gradients on; afterwards everything is as it was.

    Modes, buffers, ``.grad`` and the state of every global random generator are restored, also when
    the body raises. Inside, autocast is off: rows do not depend on the caller's precision context.
    """
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # others draw from it
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            model.eval()
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
