"""What matters: one file per importance, one line per member."""

from holdfast.configuration import register
from holdfast.importance.base import Importance, Loss
from holdfast.importance.custom import Custom
from holdfast.importance.ewc import EWC
from holdfast.importance.mas import MAS
from holdfast.importance.scp import SCP

__all__ = ["EWC", "IMPORTANCES", "MAS", "SCP", "Custom", "Importance", "Loss"]

IMPORTANCES = register(
    Importance, "importance", {"ewc": EWC, "mas": MAS, "scp": SCP, "custom": Custom}
)
