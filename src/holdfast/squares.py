r"""Σᵢ wᵢ∘wᵢ and Σᵢ σᵢwᵢ of a batch: from the layers where they can be read, by the general road elsewhere.

One forward and one backward pass serve every layer of :mod:`holdfast.layers` that is called once, with one
leading entry per example, and shares no parameter. Whether that is so is not believed but seen: a few
examples go both ways first, and only layers whose numbers agree are read from then on.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.batches import Examples
from holdfast.layers import RULES, Pair
from holdfast.structure import LayerReader, LayerShape, unshared

if TYPE_CHECKING:
    from holdfast.gradients import Gradients

__all__ = ["SignedSums", "Squares"]

_PROBES = 2  # examples that go both ways: one could not tell examples from other dimensions
_CANDIDATES = 16  # examples that they are chosen from
_ATTEMPTS = 3  # batches on which a layer may prove itself: gradients of single examples can vanish
_AGREE = 1e-3  # relative to the largest entry; rounding is far below, a wrong reading far above

_LARGE = 2**16  # entries of a weight for which memory counts more than the calls of hooks

_Owned = tuple[int, LayerShape, int | None]  # which layer, and the position of its bias


class _Site:
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
        x, g = self.inputs, self.gradient
        if self.calls != 1 or not self.plain or x is None:
            return False
        if g is None:
            return True  # the outputs do not depend on it: zero
        if x.dim() == 0 or g.dim() == 0 or len(x) != count or len(g) != count:
            return False
        finite = bool(g.sum().isfinite()) and bool(x.sum().isfinite())
        return finite and self.rule.fits(self.layer, x, g)

    def add_(self, pieces: Sequence[Tensor], names: Iterable[str]) -> None:
        """Add the squares of the parameters called ``names``."""
        x, g = self.inputs, self.gradient
        into = {name: pieces[self.positions[name]] for name in names}
        if x is None or g is None or not into:
            return
        dtype = next(iter(into.values())).dtype
        x = x.to(dtype) if x.is_floating_point() else x
        self.rule.add(self.layer, x, g.to(dtype), into)

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
            view.addmm_(g.T.to(view.dtype), x.to(view.dtype))


class Squares:
    """The diagonal of a batch of rows, added to a vector.

    Args:
        gradients: The network, and the general road to its rows.
        model: The network itself.
        parameters: The held parameters, in flat order.
    """

    def __init__(
        self, gradients: "Gradients", model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._gradients, self._parameters = weakref.proxy(gradients), parameters
        found = unshared(model, parameters)
        self._tries = 0
        self._sites = [
            _Site(module, held, [parameters[i] for i in held.values()])
            for _, module, held in found
            if type(module) in RULES
        ]

    def add_(
        self,
        out: Tensor,
        examples: Examples,
        layers: Sequence[LayerShape] = (),
        reader: LayerReader | None = None,
    ) -> None:
        r"""Add :math:`\sum_i w_i \circ w_i` to the flat vector ``out``; ``reader`` takes ``layers``."""
        if any(not site.certain for site in self._sites) and len(examples) > 1:
            self._prove(examples)
        places = {a: i for i, (a, b) in enumerate(self._gradients.space.ranges) if a < b}
        owned = {
            places[s.weight]: (k, s, None if s.bias is None else places[s.bias])
            for k, s in enumerate(layers)
        }
        done = self._read(out, examples, owned, reader)
        rest = [i for i in range(len(self._parameters)) if i not in done]
        if not rest:
            return
        pieces = self._gradients.space.split(out)
        sizes = [self._gradients.space.sizes[i] for i in rest]
        for block in self._gradients.rows(examples, rest):
            parts = dict(zip(rest, torch.split(block, sizes, 1), strict=True))
            for weight, (k, layer, bias) in owned.items():
                if reader is not None and weight in parts:
                    shift = None if bias is None else parts.pop(bias)
                    reader.rows(k, layer.join(parts.pop(weight), shift))
            for i, part in parts.items():
                pieces[i] += part.square_().sum(0).view_as(pieces[i])

    def _read(
        self,
        out: Tensor,
        examples: Examples,
        owned: Mapping[int, _Owned],
        reader: LayerReader | None,
    ) -> set[int]:
        """Add what the layers tell; returns the positions of the parameters that are done."""
        sites = [site for site in self._sites if site.certain]
        if not sites:
            return set()
        untouched, pieces = self._pass(sites, examples), self._gradients.space.split(out)
        watched = {i for site in sites for i in site.positions.values()}
        told = set()  # the reader hears of every layer that is its own
        if reader is not None:
            told = {i for weight, (_, _, bias) in owned.items() for i in (weight, bias)}
        done = untouched - watched - told
        for site in sites:
            held = set(site.positions.values())
            if not site.calls:
                done |= (held & untouched) - told
            elif site.readable(len(examples)) and held <= untouched:
                self._take(site, pieces, owned, reader)
                done |= held
            else:  # what was proven does not hold: it is not believed again
                self._sites.remove(site)
            site.reset()
        return done

    def _take(
        self,
        site: _Site,
        pieces: Sequence[Tensor],
        owned: Mapping[int, _Owned],
        reader: LayerReader | None,
    ) -> None:
        """Add what one layer tells."""
        weight = site.positions.get("weight", -1)
        if weight not in owned or reader is None:
            site.add_(pieces, site.positions)
            return
        k, _, bias = owned[weight]
        for pair in site.pairs(pieces[weight].dtype, bias is not None):
            reader.pairs(k, *pair)
        if bias is None:
            site.add_(pieces, site.positions.keys() - {"weight"})

    def _pass(
        self, sites: Sequence[_Site], examples: Examples, weights: Tensor | None = None
    ) -> set[int]:
        """One forward and backward pass of all examples; the sites keep what they see.

        Returns:
            The positions of parameters without a gradient: nothing depends on them but what is read.
        """
        with _watched(sites):
            values = self._gradients.values(examples)
            _backward((values if weights is None else values * weights).sum(), sites)
        untouched = {i for i, p in enumerate(self._parameters) if p.grad is None}
        self._gradients.forget()
        return untouched

    def _prove(self, examples: Examples) -> None:
        """Let two examples go both ways; only layers that agree are read from now on.

        They count alike, so that one cannot hide what the other would show. Where one has no gradient,
        or a layer has none, nothing is decided.
        """
        self._tries += 1
        candidates = examples.pick(slice(0, _CANDIDATES))
        # examples that are fitted perfectly have no gradient to compare
        best = self._gradients.values(candidates).detach().abs().topk(_PROBES).indices
        few = candidates.pick(best.sort().values)
        singles = [
            self._gradients.single_squares(few.pick(slice(i, i + 1))) for i in range(_PROBES)
        ]
        totals = torch.stack([single.sum() for single in singles])
        if bool((totals > 0).all()):
            weights = totals.sum() / totals
            expected = sum(w * s for w, s in zip(weights, singles, strict=True))
            self._judge(few, weights.sqrt(), self._gradients.space.split(expected))
        if self._tries == _ATTEMPTS:
            self._sites = [site for site in self._sites if site.certain]

    def _judge(self, few: Examples, weights: Tensor, truth: Sequence[Tensor]) -> None:
        """Keep the layers that tell the truth, drop those that do not."""
        open_sites = [site for site in self._sites if not site.certain]
        untouched = self._pass(open_sites, few, weights)
        pieces = self._gradients.space.split(
            torch.zeros(self._gradients.space.dim, **self._gradients.like)
        )
        for site in open_sites:
            held = set(site.positions.values())
            if site.readable(len(few)) and held <= untouched:
                site.add_(pieces, site.positions)
                told = [_agree(pieces[i], truth[i]) for i in held]
                site.certain = all(told) and any(bool(truth[i].any()) for i in held)
            site.reset()


class SignedSums:
    r"""The gradient of a scalar, added to a vector; large linear layers write there directly.

    Autograd makes a gradient of its own and adds it afterwards: three more passes over memory. With
    inputs A and output gradients G the sum is one product, :math:`G^\top A`, added in place.
    """

    def __init__(
        self, gradients: "Gradients", model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._gradients, self._parameters = weakref.proxy(gradients), parameters
        self._sites: list[_Site] = []
        self._tries = 0
        self._open = [
            _Site(module, held, [parameters[held["weight"]]])
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
        with _watched(self._open):
            _backward(scalar(), self._open)
        self._gradients.forget()
        undecided = []
        for site, truth in zip(self._open, truths, strict=True):
            if truth is None or not bool(truth.any()):
                undecided.append(site)
            elif site.calls == 1 and site.plain:
                found = torch.zeros(truth.shape, **self._gradients.like)
                site.add_sum_(found)
                self._sites += [site] if _agree(found, truth) else []
            site.reset()
        self._open = undecided if self._tries < _ATTEMPTS else []

    def _fused(self, out: Tensor, scalar: Callable[[], Tensor]) -> bool:
        """One pass; False, and nothing added, if a layer was not called exactly once."""
        with _watched(self._sites):
            _backward(scalar(), self._sites)
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


def _backward(scalar: Tensor, sites: Sequence[_Site]) -> None:
    """The backward pass; what was called with a graph before is only repeated in it."""
    for site in sites:
        site.complete = site.calls > 0
    if scalar.requires_grad:
        torch.autograd.backward(scalar)


def _agree(found: Tensor, expected: Tensor) -> bool:
    return bool(_largest(found - expected) <= _AGREE * _largest(expected))


def _largest(x: Tensor) -> Tensor:
    """The largest |x|, without writing |x| out."""
    low, high = x.aminmax()
    return torch.maximum(high, -low)


@contextlib.contextmanager
def _watched(sites: Sequence[_Site]) -> Iterator[None]:
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
