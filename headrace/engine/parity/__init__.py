"""Parity: whether the engine and a model's own library compute the same, number by number."""

from headrace.engine.parity.measure import measure, measure_external
from headrace.engine.parity.report import Line, Parity

__all__ = ["Line", "Parity", "measure", "measure_external"]
