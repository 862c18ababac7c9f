"""Layers with a state: causal convolutions and linear recurrences over packed rows, with the state of each row in a block."""

from headrace.kernels.state.metadata import StateMetadata

__all__ = ["StateMetadata"]
