"""Scheme: the number format of each matrix of a checkpoint, by the checkpoint's own names."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from headrace.errors import ConfigError
from headrace.layers.stored import QuantSpec
from headrace.model_spec.integers import is_integer
from headrace.options import shown

Layout = Literal["scaled", "packed", "gptq", "gptq_v2", "awq", "fp4", "mxfp4_blocks", "int4_bytes"]
"""Arrangements of codes and scales in a checkpoint's tensors; ``weights/layouts.py`` reads each."""
_FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = dict(_FUSED) | {part: (fused,) for fused, parts in _FUSED for part in parts}
"""Last component of a module's name -> what a pattern may call it that was written for a model with other fusions."""
_REGEX = re.compile(r"[\\^$+?()\[\]{}|]")


@dataclasses.dataclass(frozen=True)
class MatrixFormat:
    layout: Layout
    spec: QuantSpec


@dataclasses.dataclass(frozen=True)
class Rule:
    """The format of the matrices that a pattern of the configuration names."""

    field: str
    """Where the configuration says it, for errors."""
    format: MatrixFormat | None
    """None: floats."""
    pattern: str | None = None
    """The pattern as it is written; None: the rule holds for every matrix."""
    matches: Callable[[str], object] | None = None
    """Tests a module's name; None: the pattern is some whole components of it."""

    def __str__(self) -> str:
        return self.field if self.pattern is None else f"{self.field} {shown(self.pattern)}"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The first rule that names a module decides its matrix."""

    method: str
    rules: tuple[Rule, ...]
    rounds_kv: bool = False
    """Its writer means the KV cache in FP8."""

    @functools.cached_property
    def _components(self) -> Mapping[str, int]:
        """Patterns that are components of names -> the first rule with each. Checkpoints have tens of thousands of modules, and
        lists hundreds of patterns."""
        plain = [(index, rule.pattern) for index, rule in enumerate(self.rules) if rule.matches is None and rule.pattern]
        return {pattern.strip("."): index for index, pattern in reversed(plain)}

    @functools.cached_property
    def _tested(self) -> Sequence[tuple[int, Rule]]:
        return [(index, rule) for index, rule in enumerate(self.rules) if rule.matches is not None or rule.pattern is None]

    def rule(self, module: str) -> Rule:
        """Returns the rule for a module's matrix. The last rule, that no pattern names it, is that it is stored as floats."""
        names = list(_names(module))
        found = len(self.rules)
        for name in names:
            parts = name.split(".")
            for start, stop in itertools.combinations(range(len(parts) + 1), 2):
                found = min(found, self._components.get(".".join(parts[start:stop]), found))
        for index, rule in self._tested:
            if index > found:
                break
            if rule.matches is None or _named(rule.matches, names):
                return rule
        return self.rules[found] if found < len(self.rules) else Rule(f"no pattern of {self.method} names it", None)

    def __str__(self) -> str:
        """The method and its formats, for reports."""
        formats = dict.fromkeys(str(rule.format.spec) for rule in self.rules if rule.format is not None)
        return f"{self.method}: {'; '.join(formats)}"


def _names(module: str) -> Iterator[str]:
    yield module
    folder, dot, last = module.rpartition(".")
    for other in _OTHER_NAMES.get(last, ()):
        yield f"{folder}{dot}{other}"


def _named(matches: Callable[[str], object], names: Sequence[str]) -> bool:
    """Whether a test means a module of these names. One that a part of a fused module passes, as ``.*up_proj`` does, means
    parts: that it matches ``gate_up_proj`` too says nothing of ``gate_proj``."""
    if matches(names[0]):
        return True
    return any(matches(other) and not any(map(matches, list(_names(other))[1:])) for other in names[1:])


class Fields:
    """Reads the fields of a ``quantization_config``. Every error names the field, the value and what is accepted."""

    def __init__(self, method: str, values: Mapping[str, Any], where: str = "") -> None:
        """``where``: the path of the fields in the configuration, with a dot at its end."""
        self.method = method
        self.values = values
        self.where = where

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, accepted: str) -> ConfigError:
        """Returns the error for a value that is not supported."""
        return ConfigError(
            f"quantization_config ({self.method}): {self.where}{name} {shown(self.get(name))} is not supported; {accepted}",
            "quantization_config",
        )

    def choice(self, name: str, choices: Sequence[Any], default: Any = None) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) != isinstance(choices[0], bool) or value not in choices:
            raise self.refuse(name, f"supported are: {', '.join(str(one) for one in choices)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.choice(name, (True, False), default))

    def size(self, name: str) -> int:
        value = self.values.get(name)
        if not is_integer(value, 1):
            raise self.refuse(name, "it must be a positive integer")
        return int(value)

    def group(self, name: str) -> Literal["channel"] | tuple[int, int]:
        """Inputs that share a scale; -1: all of an output."""
        return "channel" if self.get(name) == -1 else (1, self.size(name))

    def tile(self, name: str) -> tuple[int, int] | None:
        """Outputs and inputs that share a scale; None where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not (isinstance(value, list | tuple) and len(value) == 2 and all(is_integer(side, 1) for side in value)):
            raise self.refuse(name, "it must be two positive integers")
        return value[0], value[1]

    def within(self, name: str) -> Fields:
        """The fields of an object within; empty where it is absent."""
        value = self.values.get(name)
        if not isinstance(value, dict | None):
            raise self.refuse(name, "it must be an object")
        return Fields(self.method, value or {}, f"{self.where}{name}.")

    def patterns(self, *names: str) -> Iterator[tuple[str, str]]:
        """(field, pattern) of lists of patterns."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not (isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value)):
                raise self.refuse(name, "it must be a list of names")
            for pattern in value:
                yield self.where + name, pattern

    def floats(self, *names: str) -> Iterator[Rule]:
        """The rules of lists that name matrices which are stored as floats."""
        for field, pattern in self.patterns(*names):
            yield Rule(field, None, pattern, self.matcher(field, pattern))

    def matcher(self, field: str, pattern: str) -> Callable[[str], object] | None:
        """Returns the test of a module's name: by a regular expression from its beginning (``re:``), or by components of the
        name, in which ``*`` stands for anything; None: they are plain ones."""
        if pattern.startswith("re:"):
            return self.regex(field, pattern.removeprefix("re:")).match
        if not _REGEX.search(pattern):
            if "*" not in pattern:
                return None
            glob = re.escape(pattern.strip(".")).replace(r"\*", ".*")
            return re.compile(rf"(?:.*\.)?(?:{glob})(?:\..*)?").fullmatch
        return self.regex(field, rf"(?:.*\.)?(?:{pattern})(?:\..*)?").fullmatch

    def regex(self, field: str, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"quantization_config ({self.method}): {field} has {shown(pattern)}, which is no regular expression: {error}",
                "quantization_config",
            ) from None
