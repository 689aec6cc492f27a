"""Speed, measured as ratios on this machine: ``holdfast bench``."""

from holdfast.bench.measuring import Measurement, Ratio, exponent, peak_bytes, ratio
from holdfast.bench.running import run
from holdfast.bench.suites import SUITES

__all__ = ["SUITES", "Measurement", "Ratio", "exponent", "peak_bytes", "ratio", "run"]
