"""Augmentation against a written-out loop over images."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.augmentation import Augmentation


def written_out(spec: Augmentation, images: Tensor, seed: int) -> Tensor:
    """Image by image: pad by reflection, crop, flip, cut; the same random numbers in the same order."""
    generator = torch.Generator().manual_seed(seed)
    count, _, height, width = images.shape
    span = 2 * spec.translate + 1
    down = torch.randint(span, (count, 1), generator=generator) - spec.translate
    right = torch.randint(span, (count, 1), generator=generator) - spec.translate
    flips = torch.rand(count, 1, generator=generator) < 0.5
    top = torch.randint(height, (count, 1), generator=generator) - spec.cutout // 2
    left = torch.randint(width, (count, 1), generator=generator) - spec.cutout // 2
    out = []
    for i, image in enumerate(images):
        padded = functional.pad(image[None], [spec.translate] * 4, mode="reflect")[0]
        y, x = int(down[i]) + spec.translate, int(right[i]) + spec.translate
        moved = padded[:, y : y + height, x : x + width].clone()
        if flips[i]:
            moved = moved.flip(2)
        rows = slice(max(0, int(top[i])), max(0, int(top[i]) + spec.cutout))
        columns = slice(max(0, int(left[i])), max(0, int(left[i]) + spec.cutout))
        moved[:, rows, columns] = 0
        out.append(moved)
    return torch.stack(out)


@pytest.mark.parametrize("spec", [Augmentation(), Augmentation(translate=1, cutout=5)])
def test_equals_the_written_out_loop(spec: Augmentation) -> None:
    images = torch.randn(40, 3, 12, 16)
    before = images.clone()
    found = spec(images, torch.Generator().manual_seed(3))
    assert torch.equal(found, written_out(spec, images, 3))
    assert torch.equal(images, before)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_nothing_changes_where_nothing_is_asked() -> None:
    images = torch.randn(5, 3, 8, 8)
    nothing = Augmentation(flip=False, translate=0, cutout=0)
    assert torch.equal(nothing(images, torch.Generator()), images)


def test_the_generator_decides() -> None:
    images, spec = torch.randn(30, 3, 32, 32), Augmentation()
    one, same, other = (spec(images, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    generator = torch.Generator().manual_seed(1)
    assert not torch.equal(spec(images, generator), spec(images, generator))


def test_half_are_flipped_and_moves_are_uniform() -> None:
    ramp = torch.arange(32.0).expand(4000, 1, 32, 32)
    found = Augmentation(cutout=0)(ramp, torch.Generator().manual_seed(0))
    middle = found[:, 0, 10, 16]
    flipped = found[:, 0, 10, 17] < middle
    assert abs(float(flipped.float().mean()) - 0.5) < 0.03
    shifts = torch.where(flipped, middle - 15, middle - 16).long()
    counts = (shifts + 4).bincount()
    assert len(counts) == 9
    assert float((counts / 4000 - 1 / 9).abs().max()) < 0.02


def test_the_hole_is_8_by_8_inside_and_clipped_at_the_border() -> None:
    spec = Augmentation(flip=False, translate=0)
    holes = (spec(torch.ones(4000, 1, 32, 32), torch.Generator().manual_seed(0)) == 0).sum(
        (1, 2, 3)
    )
    assert int(holes.max()) == 64
    assert int(holes.min()) == 16  # centre in the first corner: 4 × 4 are left
    assert abs(float((holes == 64).float().mean()) - (25 / 32) ** 2) < 0.03


@pytest.mark.parametrize(
    ("fields", "message"), [({"translate": -1}, "translate is 0"), ({"cutout": -1}, "cutout is 0")]
)
def test_refuses(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(**fields)


def test_refuses_wrong_images() -> None:
    with pytest.raises(ValueError, match="expected images"):
        Augmentation()(torch.zeros(3, 32, 32), torch.Generator())
    with pytest.raises(ValueError, match="smaller than an image"):
        Augmentation()(torch.zeros(1, 3, 4, 4), torch.Generator())
