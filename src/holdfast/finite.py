"""Numbers that are not finite are refused, and where they come from is said."""

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["check_parameters", "check_values", "first_infinite", "position"]


def check_parameters(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse complex parameters, and those that hold NaN or inf, by name."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name} is complex; hold real ones only: make it a real parameter "
                "and use torch.view_as_complex in the model, or leave it out with exclude="
            )
        # a sum is a quick look: it is not finite where an entry is not, or where it overflows
        if not bool(parameter.detach().sum().isfinite() or parameter.isfinite().all()):
            raise ValueError(
                f"parameter {name} holds NaN or inf: training has diverged; go back to finite "
                "weights before consolidating"
            )


def check_values(values: Tensor, examples: Tensor | int = 0) -> Tensor:
    """The values, or an error that names the example whose value is not finite."""
    bad = ~values.detach().isfinite().all(1)
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        found = values[where].tolist()
        raise ValueError(
            f"the loss (or potential) of example {position(examples, where)} is "
            f"{found[0] if len(found) == 1 else found}, expected a finite number; look at that "
            "example and at the model's outputs for it"
        )
    return values


def first_infinite(rows: Tensor) -> int | None:
    """The first row with an entry that is not finite; their sum is a quick look without memory."""
    if bool(rows.sum().isfinite()):
        return None
    bad = ~rows.isfinite().all(1)  # the sum of finite numbers may overflow
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def position(examples: Tensor | int, where: int) -> str:
    """Which example, as a person would look for it."""
    place = examples + where if isinstance(examples, int) else int(examples[where])
    return f"{place} (counted from 0 in order of arrival)"
