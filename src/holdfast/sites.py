"""A layer, what went in and what came back, and how both are seen without a trace.

Whether a layer may be read is not believed but seen: a few examples go both ways first, and only layers whose
numbers agree are read from then on (:mod:`holdfast.squares`, :mod:`holdfast.signed_sums`).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.layers import RULES, Pair
from holdfast.products import add_product_

__all__ = ["ATTEMPTS", "Site", "backward", "watched"]

ATTEMPTS = 3  # batches on which a layer may prove itself: gradients of single examples can vanish
_AGREE = 1e-3  # relative to the largest entry; rounding is far below, a wrong reading far above
_NETWORK = 8  # roundings of a network in half precision, whose own gradients are no better
_ROUNDING = (
    1000  # rounding of a sum, in units of ε times its terms without signs; measured up to 90
)


class Site:
    """One layer, and what passed through it."""

    def __init__(
        self, layer: nn.Module, positions: dict[str, int], quiet: Sequence[nn.Parameter]
    ) -> None:
        self.layer, self.positions, self.rule = layer, positions, RULES[type(layer)]
        self.quiet = quiet  # what is read here, so that autograd need not differentiate it
        self.certain = False
        self.reset()

    def reset(self) -> None:
        self.calls, self.inputs, self.gradient, self.silent = 0, None, None, None
        self.plain, self.complete = True, False

    inputs: Tensor | None
    gradient: Tensor | None
    silent: Tensor | None  # the gradient where none comes back: zeros, without memory

    def hush(self, layer: nn.Module, args: Any) -> None:
        """Called before the layer. Any other use of its parameters leaves a gradient, which is seen."""
        self.speak(False)

    def speak(self, aloud: bool = True) -> None:
        """Whether autograd differentiates what is read here."""
        for parameter in self.quiet:
            parameter.requires_grad_(aloud)

    def watch(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """Called after the layer; returns an output that takes part in the backward pass."""
        self.speak()
        if not torch.is_grad_enabled():  # a reentrant checkpoint, the first time
            return None
        if not isinstance(output, Tensor):
            self.calls, self.plain = self.calls + 1, False
            return None
        replaced = None
        if not output.requires_grad:  # its parameters are quiet and nothing before it is held
            output = replaced = output + output.new_zeros((), requires_grad=True)
        if self.complete:  # a checkpoint, the second time: the same graph again
            return replaced
        self.calls += 1
        self.plain = self.plain and len(args) == 1 and not kwargs
        if self.calls == 1 and self.plain:
            self.inputs = args[0].detach()
            self.silent = output.new_zeros(()).expand(output.shape)
            output.register_hook(self.keep)
        return replaced

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach()

    def readable(self, count: int) -> bool:
        """Whether exactly one call with one leading entry per example was seen."""
        x, g = self.inputs, self.silent if self.gradient is None else self.gradient
        if self.calls != 1 or not self.plain or x is None or g is None:
            return False
        if x.dim() == 0 or g.dim() == 0 or len(x) != count or len(g) != count:
            return False
        finite = bool(g.sum().isfinite()) and bool(x.sum().isfinite())
        return finite and self.rule.fits(self.layer, x, g)

    def add_(self, pieces: Sequence[Tensor], names: Iterable[str]) -> None:
        """Add the squares of the parameters called ``names``."""
        self._add({name: pieces[self.positions[name]] for name in names}, signed=True)

    def _add(self, into: Mapping[str, Tensor], signed: bool) -> None:
        """Add squares by name: of the gradients, or of sums of the same terms without their signs."""
        x, g = self.inputs, self.gradient
        if x is None or g is None or not into:
            return
        g = g.to(next(iter(into.values())).dtype)
        x = x.to(g.dtype) if x.is_floating_point() else x
        self.rule.add(self.layer, *((x, g) if signed else (x.abs(), g.abs())), into)

    def tells(self, found: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
        """Whether the squares found are the true ones, and are not all zero.

        A parameter that has no influence has a gradient whose terms cancel (the bias of attention's
        keys, a bias before a normalisation): its squares are rounding, and different ones each way. They
        agree if both are as small as rounding makes them, measured by the terms that cancel; but
        they prove nothing, so another parameter of the layer must.
        """
        same = {n for n, i in self.positions.items() if self.agree(found[i], truth[i])}
        if not any(bool(truth[self.positions[n]].any()) for n in same):
            return False
        others = {n: i for n, i in self.positions.items() if n not in same}
        terms = {n: torch.zeros_like(found[i]) for n, i in others.items()}
        self._add(terms, signed=False)
        return all(self.agree(found[i], truth[i], terms[n]) for n, i in others.items())

    def agree(self, found: Tensor, expected: Tensor, terms: Tensor | None = None) -> bool:
        """Whether two readings are the same but for rounding, that of the network included.

        Args:
            found: One of them.
            expected: The other.
            terms: For squares of sums that cancel: those of the same sums without signs.
        """
        seen = expected.dtype if self.gradient is None else self.gradient.dtype
        allowed = max(_AGREE, _NETWORK * torch.finfo(seen).eps) * _largest(expected)
        if terms is not None:
            allowed = allowed + (_ROUNDING * torch.finfo(terms.dtype).eps) ** 2 * _largest(terms)
        return bool(_largest(found - expected) <= allowed)

    def pairs(self, dtype: torch.dtype, bias: bool) -> Iterator[Pair]:
        """What the layer's matrix was multiplied with and what came back, the bias as an input."""
        x, g = self.inputs, self.silent if self.gradient is None else self.gradient
        if x is None or g is None or self.rule.pairs is None:
            return
        for inputs, gradients in self.rule.pairs(self.layer, x.to(dtype), g.to(dtype)):
            if bias:
                ones = inputs.new_ones(()).expand(*inputs.shape[:-1], 1)
                yield torch.cat([inputs, ones], -1), gradients
            else:
                yield inputs, gradients

    def add_sum_(self, view: Tensor) -> None:
        """Add the gradient of a linear layer's weight."""
        x, g = self.inputs, self.gradient
        if x is not None and g is not None:
            g, x = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
            add_product_(view, g.T.to(view.dtype), x.to(view.dtype))


def backward(scalar: Tensor, sites: Sequence[Site]) -> None:
    """The backward pass; what was called with a graph before is only repeated in it."""
    for site in sites:
        site.complete = site.calls > 0
    if scalar.requires_grad:
        torch.autograd.backward(scalar)


def _largest(x: Tensor) -> Tensor:
    """The largest |x|, without writing |x| out."""
    low, high = x.aminmax()
    return torch.maximum(high, -low)


@contextlib.contextmanager
def watched(sites: Sequence[Site]) -> Iterator[None]:
    """Hooks in place, and no gradients of what is read from them."""
    handles = []
    try:
        for site in sites:
            handles.append(site.layer.register_forward_pre_hook(site.hush))
            handles.append(site.layer.register_forward_hook(site.watch, with_kwargs=True))
        yield
    finally:
        for site in sites:
            site.speak()
        for handle in handles:
            handle.remove()
