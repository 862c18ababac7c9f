"""Parity: whether the engine and a model's own library compute the same, number by number."""

from headrace.host.wait import rest_early

# Before anything here imports torch.
rest_early()

from headrace.parity.measure import measure, measure_external  # noqa: E402
from headrace.parity.report import Line, Parity  # noqa: E402

__all__ = ["Line", "Parity", "measure", "measure_external"]
