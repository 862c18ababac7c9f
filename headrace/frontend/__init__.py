"""Interfaces of the engine for callers: prompts become requests, and deltas become outputs."""

from headrace.host.wait import rest_early

# Before anything here imports torch.
rest_early()
