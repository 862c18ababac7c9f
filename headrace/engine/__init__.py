"""The loop: plans steps, has an executor take them, and turns tokens into deltas."""

from headrace.host.wait import rest_early

# Before anything here imports torch.
rest_early()
