r"""Σᵢ σᵢwᵢ of a batch, added to a vector: by autograd, or by large linear layers directly."""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holdfast.sites import ATTEMPTS, Site, backward, watched
from holdfast.structure import unshared

if TYPE_CHECKING:
    from holdfast.gradients import Gradients

__all__ = ["SignedSums"]

_LARGE = 2**16  # entries of a weight for which memory counts more than the calls of hooks


class SignedSums:
    r"""The gradient of a scalar, added to a vector; large linear layers write there directly.

    Autograd makes a gradient of its own and adds it afterwards: three more passes over memory. With
    inputs A and output gradients G the sum is one product, :math:`G^\top A`, added in place.
    """

    def __init__(
        self, gradients: "Gradients", model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._gradients, self._parameters = weakref.proxy(gradients), parameters
        self._sites: list[Site] = []
        self._tries = 0
        self._open = [
            Site(module, held, [parameters[held["weight"]]])
            for _, module, held in unshared(model, parameters)
            if type(module) is nn.Linear
            and "weight" in held
            and parameters[held["weight"]].numel() >= _LARGE
        ]

    def add_(self, out: Tensor, scalar: Callable[[], Tensor]) -> None:
        """Add the gradient of ``scalar()``."""
        if self._open:
            self._prove(scalar)
        if not self._sites or not self._fused(out, scalar):
            self._gradients.add_gradient_(out, scalar())

    def _prove(self, scalar: Callable[[], Tensor]) -> None:
        """Go both ways; layers that do not agree are left to autograd, those without a gradient wait."""
        self._tries += 1
        weights = [self._parameters[site.positions["weight"]] for site in self._open]
        self._gradients.backward(scalar())
        truths = [weight.grad for weight in weights]  # as autograd made them: no copies
        self._gradients.forget()
        with watched(self._open):
            backward(scalar(), self._open)
        self._gradients.forget()
        undecided = []
        for site, truth in zip(self._open, truths, strict=True):
            if truth is None or not bool(truth.any()):
                undecided.append(site)
            elif site.calls == 1 and site.plain:
                found = torch.zeros(truth.shape, **self._gradients.like)
                site.add_sum_(found)
                self._sites += [site] if site.agree(found, truth) else []
            site.reset()
        self._open = undecided if self._tries < ATTEMPTS else []

    def _fused(self, out: Tensor, scalar: Callable[[], Tensor]) -> bool:
        """One pass; False, and nothing added, if a layer was not called exactly once."""
        with watched(self._sites):
            backward(scalar(), self._sites)
        once = all(site.calls == 1 and site.plain for site in self._sites)
        if once:
            direct = {site.positions["weight"]: site for site in self._sites}
            for i, view in enumerate(self._gradients.space.split(out)):
                site, gradient = direct.get(i), self._parameters[i].grad
                if site is not None:
                    site.add_sum_(view)
                if gradient is not None:  # of a layer, where its weight is used elsewhere too
                    view += gradient
        for site in self._sites:
            site.reset()
        self._gradients.forget()
        return once
