"""The engine: core loop, process boundary, clients."""

from headrace.engine.wait import rest_early

# Before anything here imports torch.
rest_early()
