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

    def __init__(self, layer: nn.Module, positions: dict[str, int]) -> None:
        self.layer, self.positions, self.rule = layer, positions, RULES[type(layer)]
        self.certain = False
        self.reset()

    def reset(self) -> None:
        self.calls, self.inputs, self.gradient, self.silent = 0, None, None, None
        self.plain, self.complete = True, False

    inputs: Tensor | None
    gradient: Tensor | None
    silent: Tensor | None  # the gradient where none comes back: zeros, without memory

    def watch(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """Called after the layer; returns an output that takes part in the backward pass."""
        if self.complete or not torch.is_grad_enabled():  # a checkpoint, the second or first time
            return None
        self.calls += 1
        self.plain = self.plain and len(args) == 1 and not kwargs
        if self.calls > 1 or not self.plain or not isinstance(output, Tensor):
            return None
        self.inputs = args[0].detach()
        self.silent = output.new_zeros(()).expand(output.shape)
        replaced = None
        if not output.requires_grad:  # the weight is quiet and nothing before it is held
            output = replaced = output + output.new_zeros((), requires_grad=True)
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
            view.addmm_(g.flatten(0, -2).T.to(view.dtype), x.flatten(0, -2).to(view.dtype))


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
        self._sites, self._tries = _sites(model, parameters), 0

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
        self._pass(sites, examples)
        pieces, done = self._gradients.space.split(out), set()
        for site in sites:
            if site.readable(len(examples)):
                weight = site.positions.get("weight", -1)
                if weight not in owned or reader is None:
                    site.add_(pieces, site.positions)
                else:
                    k, _, bias = owned[weight]
                    for pair in site.pairs(out.dtype, bias is not None):
                        reader.pairs(k, *pair)
                    if bias is None:
                        site.add_(pieces, site.positions.keys() - {"weight"})
                done |= set(site.positions.values())
            site.reset()
        return done

    def _pass(self, sites: Sequence[_Site], examples: Examples) -> None:
        """One forward and backward pass of all examples; the sites keep what they see."""
        with _watched(sites, self._parameters):
            _backward(self._gradients.values(examples).sum(), sites)
        self._gradients.forget()

    def _prove(self, examples: Examples) -> None:
        """Let a few examples go both ways; only layers that agree are read from now on."""
        self._tries += 1
        candidates = examples.pick(slice(0, _CANDIDATES))
        with torch.no_grad():  # examples that are fitted perfectly have no gradient to compare
            values = self._gradients.values(candidates)
            best = values.abs().topk(min(_PROBES, len(values))).indices
        few = candidates.pick(best.sort().values)
        like, dim = self._gradients.like, self._gradients.space.dim
        expected = self._gradients.single_squares(few)
        open_sites = [site for site in self._sites if not site.certain]
        self._pass(open_sites, few)
        found = torch.zeros(dim, **like)
        pieces, truth = self._gradients.space.split(found), self._gradients.space.split(expected)
        for site in open_sites:
            if site.readable(len(few)):
                site.add_(pieces, site.positions)
                site.certain = all(_agree(pieces[i], truth[i]) for i in site.positions.values())
            site.reset()
        if self._tries == _ATTEMPTS:
            self._sites = [site for site in self._sites if site.certain]


class SignedSums:
    r"""The gradient of a scalar, added to a vector; large linear layers write there directly.

    Autograd makes a gradient of its own and adds it afterwards: three more passes over memory. With
    inputs A and output gradients G the sum is one product, :math:`G^\top A`, added in place.
    """

    def __init__(
        self, gradients: "Gradients", model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._gradients, self._parameters = weakref.proxy(gradients), parameters
        self._proven = False
        self._sites = [
            site
            for site in _sites(model, parameters)
            if type(site.layer) is nn.Linear
            and "weight" in site.positions
            and parameters[site.positions["weight"]].numel() >= _LARGE
        ]

    def add_(self, out: Tensor, scalar: Callable[[], Tensor]) -> None:
        """Add the gradient of ``scalar()``."""
        if not self._proven:
            self._prove(scalar)
        if not self._sites or not self._fused(out, scalar):
            self._gradients.add_gradient_(out, scalar())

    def _prove(self, scalar: Callable[[], Tensor]) -> None:
        """Go both ways once; layers that do not agree are left to autograd."""
        self._proven = True
        if not self._sites:
            return
        weights = [self._parameters[site.positions["weight"]] for site in self._sites]
        self._gradients.backward(scalar())
        truths = [weight.grad for weight in weights]  # as autograd made them: no copies
        self._gradients.forget()
        with _watched(self._sites, self._parameters):
            _backward(scalar(), self._sites)
        self._gradients.forget()
        agreeing = []
        for site, truth in zip(self._sites, truths, strict=True):
            if site.calls == 1 and site.plain and truth is not None:
                found = torch.zeros(truth.shape, **self._gradients.like)
                site.add_sum_(found)
                agreeing += [site] if _agree(found, truth) else []
            site.reset()
        self._sites = agreeing

    def _fused(self, out: Tensor, scalar: Callable[[], Tensor]) -> bool:
        """One pass; False, and nothing added, if a layer was not called exactly once."""
        with _watched(self._sites, self._parameters):
            _backward(scalar(), self._sites)
        once = all(site.calls == 1 and site.plain for site in self._sites)
        if once:
            direct = {site.positions["weight"]: site for site in self._sites}
            for i, view in enumerate(self._gradients.space.split(out)):
                site, gradient = direct.get(i), self._parameters[i].grad
                if site is not None:
                    site.add_sum_(view)
                elif gradient is not None:
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


def _sites(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[_Site]:
    """The layers of known kinds whose held parameters belong to nobody else."""
    found = unshared(model, parameters)
    return [_Site(module, held) for _, module, held in found if type(module) in RULES]


@contextlib.contextmanager
def _watched(sites: Sequence[_Site], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hooks in place, and no gradients of large weights, which nobody would read."""
    quiet = [
        parameters[site.positions[name]]
        for site in sites
        for name in site.rule.quiet
        if name in site.positions
    ]
    handles = []
    try:
        for site in sites:
            handles.append(site.layer.register_forward_hook(site.watch, with_kwargs=True))
        for parameter in quiet:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in quiet:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()
