"""Processes of engines and ranks: their messages, supervision, and replicas."""

from headrace.host.wait import rest_early

# Before anything here imports torch.
rest_early()
