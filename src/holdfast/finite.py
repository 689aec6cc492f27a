"""Numbers that are not finite are refused, and where they come from is said."""

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["check_parameters", "check_rows", "check_values", "position"]


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


def check_rows(rows: Tensor, examples: Tensor) -> None:
    """Refuse rows with entries that are not finite.

    Args:
        rows: One per example.
        examples: Their positions of arrival; for messages.
    """
    if bool(rows.sum().isfinite()):  # a quick look without memory
        return
    bad = ~rows.isfinite().all(1)  # the sum of finite numbers may overflow
    if bool(bad.any()):
        where = position(examples, int(bad.nonzero()[0]))
        raise ValueError(
            f"the gradient of example {where} has NaN or inf entries although its loss is finite; "
            "look for a square root or a norm at zero"
        )


def position(examples: Tensor | int, where: int) -> str:
    """Which example, as a person would look for it."""
    place = examples + where if isinstance(examples, int) else int(examples[where])
    return f"{place} (counted from 0 in order of arrival)"
