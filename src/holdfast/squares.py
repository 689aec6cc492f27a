r"""Σᵢ wᵢ∘wᵢ of a batch: from the layers where they can be read, by the general road elsewhere.

One forward and one backward pass serve every layer of :mod:`holdfast.layers` that is called once, with one
leading entry per example, and shares no parameter.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holdfast.batches import Examples
from holdfast.layers import RULES
from holdfast.sites import ATTEMPTS, Site, backward, watched
from holdfast.structure import LayerReader, LayerShape, unshared

if TYPE_CHECKING:
    from holdfast.gradients import Gradients

__all__ = ["Squares"]

_PROBES = 2  # examples that go both ways: one could not tell examples from other dimensions
_CANDIDATES = 16  # examples that they are chosen from
_FIRST = 4  # batches that are looked at twice where a network may choose; later every power of two

_Marked = tuple[Tensor, Tensor]  # how much examples count, the gradients of a layer's outputs
_Owned = tuple[int, LayerShape, int | None]  # which layer, and the position of its bias


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
        self._tries, self._reads = 0, 0
        self._apart: bool | None = (
            None  # whether examples go their ways without a choice among entries
        )
        self._sites = [
            Site(module, held, [parameters[i] for i in held.values()])
            for _, module, held in found
            if type(module) in RULES
        ]

    def add_(
        self,
        out: Tensor,
        examples: Examples,
        layers: Sequence[LayerShape] = (),
        reader: LayerReader | None = None,
        *,
        ordered: bool = False,
    ) -> None:
        r"""Add :math:`\sum_i w_i \circ w_i` to the flat vector ``out``; ``reader`` takes ``layers``.

        Args:
            out: The vector.
            examples: A batch.
            layers: What the reader hears of.
            reader: Takes pairs or rows.
            ordered: Whether the reader needs the examples in their order in every layer, which is then
                proven for this batch: sums do not depend on it, rows do. What both need, an entry for every
                example, is looked at now and then where the network may choose its entries.
        """
        if any(not site.certain for site in self._sites) and len(examples) > 1:
            self._prove(examples)
        places = {a: i for i, (a, b) in enumerate(self._gradients.space.ranges) if a < b}
        owned = {
            places[s.weight]: (k, s, None if s.bias is None else places[s.bias])
            for k, s in enumerate(layers)
        }
        done = self._read(out, examples, owned, reader, ordered)
        rest = [i for i, p in enumerate(self._parameters) if i not in done and p.numel()]
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
        ordered: bool,
    ) -> set[int]:
        """Add what the layers tell; returns the positions of the parameters that are done."""
        sites = [site for site in self._sites if site.certain]
        if not sites:
            return set()
        twice = len(examples) > 1 and (ordered or self._due(examples))
        shown = self._marked(sites, examples) if twice else {}
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
            elif (
                site.readable(len(examples))
                and held <= untouched
                and (_in_order(site, shown) or (not ordered and _one_each(site, shown)))
            ):
                self._take(site, pieces, owned, reader)
                done |= held
            else:  # what was proven does not hold: it is not believed again
                self._sites.remove(site)
            site.reset()
        return done

    def _due(self, examples: Examples) -> bool:
        """Whether the entries of layers may be others than examples in this batch, and shall be looked at.

        A network that picks entries, the tokens under a mask for instance, may give a layer as many as there
        are examples without giving it one of each. It cannot be vectorised: what it picks depends on data.
        Nor can many that pick nothing, so a layer that has stood the test is not tested with every batch.
        """
        if self._apart is None:
            self._apart = self._gradients.apart(examples.pick(slice(0, _PROBES)))
        self._reads += 1
        first_or_power = self._reads <= _FIRST or not self._reads & (self._reads - 1)
        return not self._apart and first_or_power

    def _marked(self, sites: Sequence[Site], examples: Examples) -> dict[Site, _Marked]:
        """What comes back when every example counts differently, and how much each counts."""
        generator = torch.Generator().manual_seed(len(examples))
        marks = torch.randperm(len(examples), generator=generator) / len(examples) + 0.5
        marks = marks.to(device=self._gradients.device, dtype=self._gradients.like["dtype"])
        self._pass(sites, examples, marks)
        found = {site: (marks, site.gradient) for site in sites if site.gradient is not None}
        for site in sites:
            site.reset()
        return found

    def _take(
        self,
        site: Site,
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
        self, sites: Sequence[Site], examples: Examples, weights: Tensor | None = None
    ) -> set[int]:
        """One forward and backward pass of all examples; the sites keep what they see.

        Returns:
            The positions of parameters without a gradient: nothing depends on them but what is read.
        """
        with watched(sites):
            values = self._gradients.values(examples)
            backward((values if weights is None else values * weights).sum(), sites)
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
        if self._tries == ATTEMPTS:
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
                site.certain = site.tells(pieces, truth)
            site.reset()


def _in_order(site: Site, shown: Mapping[Site, _Marked]) -> bool:
    """Whether a layer's gradients grew with the marks of the examples that stand at their places.

    A network may sort its examples for a layer, by length or by expert, and undo it later.
    """
    if site not in shown or site.gradient is None or not site.gradient.numel():
        return True
    marks, marked = shown[site]
    expected = site.gradient * marks.view(-1, *[1] * (site.gradient.dim() - 1)).to(site.gradient)
    return marked.shape == expected.shape and site.agree(marked, expected)


def _one_each(site: Site, shown: Mapping[Site, _Marked]) -> bool:
    """Whether every entry of a layer grew with the mark of one example, and no two with the same."""
    marks, marked = shown[site]
    if site.gradient is None or marked.shape != site.gradient.shape:
        return False
    found, grown = (g.flatten(1).to(marks.dtype) for g in (site.gradient, marked))
    size = found.square().sum(1)
    factor = (found * grown).sum(1) / size.clamp(min=torch.finfo(size.dtype).tiny)
    owner = (factor.unsqueeze(1) - marks).abs().argmin(1)
    some = size > 0
    alone = len(owner[some].unique()) == int(some.sum())
    return alone and site.agree(grown, found * marks[owner].unsqueeze(1))
