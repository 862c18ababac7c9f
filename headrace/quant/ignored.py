"""Matrices that a user leaves in floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.errors import ConfigError, listed
from headrace.options import shown
from headrace.quant.formats.scheme import Fields, Scheme


def ignored(patterns: Sequence[str], layers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the layers that patterns name, each with the reason. One that names a part of a fused matrix names all of it.

    Args:
        layers: the names that a layer's matrices have in checkpoints, by its path.

    Raises:
        ConfigError: a pattern is no regular expression, or names no matrix.
    """
    fields = Fields("quantization_ignore", {"ignore": list(patterns)})
    try:
        rules = tuple(fields.floats("ignore"))
    except ConfigError as error:
        raise ConfigError(f"quantization_ignore: {error.message}", "quantization_ignore") from None
    found: dict[str, str] = {}
    unused = []
    for pattern, rule in zip(patterns, rules, strict=True):
        one = Scheme("quantization_ignore", (rule,))
        named = [path for path, names in layers.items() if any(one.rule(name) is rule for name in names)]
        found |= {path: f"quantization_ignore {shown(pattern)}" for path in named if path not in found}
        unused += [] if named else [shown(pattern)]
    if unused:
        raise ConfigError(f"quantization_ignore names no matrix of the model by {listed(unused)}", "quantization_ignore")
    return found
