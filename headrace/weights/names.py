"""NameTable: which rows of which parameter a checkpoint's tensor fills. It works both ways."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from headrace.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a checkpoint's tensor goes: rows ``[start, stop)`` of a parameter, or all of it (``stop`` None)."""

    parameter: str
    start: int = 0
    stop: int | None = None
    index: int | None = None
    """Of a parameter that stacks many alike, such as experts: which of them; None: it does not."""

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of the parameter, a view."""
        whole = parameter if self.index is None else parameter[self.index]
        return whole if self.stop is None else whole[self.start : self.stop]


class NameTable:
    """Checkpoint name <-> (parameter, rows), for one model. Built once a family, with ``add``, ``fuse`` and ``tie``.

    Args:
        ignorable: regular expressions of checkpoint names that carry nothing to load, matched in full.
    """

    def __init__(self, ignorable: Sequence[str] = (r".*\.rotary_emb\.inv_freq",)) -> None:
        self._parts: dict[str, Part] = {}
        self._names: dict[str, list[str]] = {}
        self._ties: dict[str, str] = {}
        self._ignorable = [re.compile(pattern) for pattern in ignorable]

    def add(self, name: str, parameter: str, index: int | None = None) -> None:
        """The tensor ``name`` is the whole of ``parameter``, or of ``parameter[index]``."""
        self._insert(name, Part(parameter, index=index))

    def fuse(self, parameter: str, names: Mapping[str, int], index: int | None = None) -> None:
        """The tensors ``names`` (name -> rows), one below the other in this order, are the whole of ``parameter``, or of
        ``parameter[index]``.
        """
        start = 0
        for name, rows in names.items():
            self._insert(name, Part(parameter, start, start + rows, index))
            start += rows

    def tie(self, name: str, parameter: str) -> None:
        """The tensor ``name`` may be in a checkpoint, equal to the tied ``parameter``; nothing is made of it."""
        self._ties[name] = parameter

    def _insert(self, name: str, part: Part) -> None:
        if name in self._parts:
            raise ValueError(f"{name} is in the table already")
        self._parts[name] = part
        self._names.setdefault(part.parameter, []).append(name)

    def part(self, name: str) -> Part | None:
        """Where the checkpoint's tensor ``name`` goes; None: the table has no such name."""
        return self._parts.get(name)

    def tied(self, name: str) -> str | None:
        """The parameter that the checkpoint's tensor ``name`` must equal; None: it is no tie."""
        return self._ties.get(name)

    def ignored(self, name: str) -> bool:
        """True if a checkpoint's tensor of this name carries nothing to load."""
        return any(pattern.fullmatch(name) for pattern in self._ignorable)

    def names(self, parameter: str) -> list[str]:
        """The checkpoint's tensors that make up ``parameter``, from its first row to its last.

        Raises:
            KeyError: the table has no such parameter.
        """
        return list(self._names[parameter])

    def items(self) -> Iterator[tuple[str, Part]]:
        """Every checkpoint name with its part."""
        yield from self._parts.items()

    def all_names(self) -> list[str]:
        """Every checkpoint name that is known, ties included."""
        return [*self._parts, *self._ties]

    def parameters(self) -> list[str]:
        """Every parameter that the table fills."""
        return list(self._names)

    def export(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's weights under their checkpoint names: views, in the order of the table.

        Raises:
            ConfigError: a parameter is not there under its name, because it was quantised when it was loaded.
        """
        parameters = dict(model.named_parameters())
        for name, part in self._parts.items():
            if part.parameter not in parameters:
                raise ConfigError(
                    f"{part.parameter} is quantised, so it cannot be exported as {name}: load the model with quantization none",
                    "quantization",
                )
            yield name, part.view(parameters[part.parameter].detach())
