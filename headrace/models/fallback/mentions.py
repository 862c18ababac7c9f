"""Which names the source code of a model mentions: what is nowhere in it, no module of it reads."""

from __future__ import annotations

import ast
import functools
import inspect

from transformers import PretrainedConfig, PreTrainedModel

_GENERAL = ("builtins", "abc", "typing", "torch", "transformers")
"""Packages that are of all models, and tell nothing of one."""
_MODELS = "transformers.models"
"""A package of one of those that is of models each."""


def mentioned_by(config: PretrainedConfig, model: PreTrainedModel) -> frozenset[str]:
    """Attributes, strings and imported names in the modules where the model's classes and its configuration's are written.

    What a model reads is among them; what is among them need not be read. A class whose source is not there mentions
    nothing.
    """
    kinds = {type(config), *(type(part) for part in model.modules())}
    modules = {base.__module__: base for kind in kinds for base in kind.__mro__ if not _general(base.__module__)}
    return frozenset().union(*(_names(base) for base in modules.values()))


def _general(module: str) -> bool:
    return not _within(module, _MODELS) and any(_within(module, name) for name in _GENERAL)


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@functools.cache
def _names(kind: type) -> frozenset[str]:
    """Of the module where a class is written."""
    module = inspect.getmodule(kind)
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else None
    except (OSError, TypeError):
        return frozenset()
    names = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.alias):
            names.add(node.name)
    return frozenset(names)
