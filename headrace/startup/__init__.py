"""Builds an engine: finds the model, loads it, measures memory, and reports what was decided."""

from headrace.host.wait import rest_early

# Before anything here imports torch.
rest_early()
