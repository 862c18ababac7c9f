"""Resolves arguments, model and device to a configuration, with the reason of each choice.

Three owners decide: ``model`` number formats, ``schedule`` how steps run, ``memory`` the size of the KV cache.
"""

from headrace.resolve.config import resolve
from headrace.resolve.facts import DeviceFacts

__all__ = ["DeviceFacts", "resolve"]
