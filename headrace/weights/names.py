"""NameTable: which rows of which parameter a checkpoint's tensor fills. It works both ways."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from headrace.errors import ConfigError

IGNORABLE = (r".*\.rotary_emb\.inv_freq",)
"""Checkpoint names, in full, of what can be computed."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a checkpoint holds a matrix in another way than its parameter does."""

    rows: Callable[[], Sequence[int]] | None = None
    """Gives for each row of the parameter's part the row of the stored tensor: a permutation. None: they are in order."""
    axis: int = 0
    """Of the part: what ``rows`` counts along."""
    transposed: bool = False
    """It is stored as ``[..., inputs, outputs]``; ``rows`` are those of its transpose."""
    wrapped: bool = False
    """It is stored with another axis before all others, of length 1."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's shape, of the part's."""
        shape = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        return (1, *shape) if self.wrapped else shape

    def take(self, stored: torch.Tensor) -> torch.Tensor:
        """From the stored tensor to the parameter's part."""
        whole = stored.squeeze(0) if self.wrapped else stored
        whole = whole.mT if self.transposed else whole
        return whole if self.rows is None else whole.index_select(self.axis, torch.tensor(self.rows(), device=whole.device))

    def give(self, part: torch.Tensor) -> torch.Tensor:
        """Back: what ``take`` makes this part of."""
        whole = part
        if self.rows is not None:
            whole = torch.empty_like(part).index_copy_(self.axis, torch.tensor(self.rows(), device=part.device), part)
        whole = whole.mT if self.transposed else whole
        return whole.unsqueeze(0) if self.wrapped else whole


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a checkpoint's tensor goes: rows ``[start, stop)`` of a parameter, or all of it (``stop`` None)."""

    parameter: str
    start: int = 0
    stop: int | None = None
    index: int | None = None
    """Of a parameter that stacks many alike, such as experts: which of them; None: it does not."""
    layout: Layout | None = None
    """None: the checkpoint's tensor is laid out like the rows it fills."""

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of the parameter, a view."""
        whole = parameter if self.index is None else parameter[self.index]
        return whole if self.stop is None else whole[self.start : self.stop]

    def stored_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = tuple(self.view(parameter).shape)
        return shape if self.layout is None else self.layout.stored_shape(shape)

    def fill(self, parameter: torch.Tensor, stored: torch.Tensor) -> None:
        """Copies the checkpoint's tensor to its place."""
        self.view(parameter).copy_(stored if self.layout is None else self.layout.take(stored))

    def stored(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the checkpoint's tensor would be: a view of the parameter where both are laid out alike."""
        view = self.view(parameter)
        return view if self.layout is None else self.layout.give(view)


class NameTable:
    """Checkpoint name <-> (parameter, rows), for one model. Built once a family, with ``add``, ``fuse``, ``tie`` and, for
    checkpoints that hold the same in other tensors, ``instead``.

    Args:
        ignorable: regular expressions of checkpoint names that carry nothing to load, matched in full.
    """

    def __init__(self, ignorable: Sequence[str] = IGNORABLE) -> None:
        self._parts: dict[str, Part] = {}
        self._names: dict[str, list[str]] = {}
        self._ties: dict[str, str] = {}
        self._instead: dict[str, dict[str, Part]] = {}
        self._ignorable = [re.compile(pattern) for pattern in ignorable]
        self._elsewhere: list[dict[str, str]] = []
        self._moved: dict[str, str] = {}

    def add(self, name: str, parameter: str, index: int | None = None, layout: Layout | None = None) -> None:
        """The tensor ``name`` is the whole of ``parameter``, or of ``parameter[index]``."""
        self._insert(name, Part(parameter, index=index, layout=layout))

    def fuse(
        self,
        parameter: str,
        names: Mapping[str, int],
        index: int | None = None,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        """The tensors ``names`` (name -> rows), one below the other in this order, are the whole of ``parameter``, or of
        ``parameter[index]``.

        Args:
            layouts: of those tensors that are laid out in another way.
        """
        start = 0
        for name, rows in names.items():
            self._insert(name, Part(parameter, start, start + rows, index, (layouts or {}).get(name)))
            start += rows

    def instead(self, name: str, parameter: str, layout: Layout | None = None) -> None:
        """A checkpoint may have one tensor ``name`` in place of all those that make up ``parameter``.

        ``chosen`` takes it where it is there.
        """
        self._instead.setdefault(parameter, {})[name] = Part(parameter, layout=layout)

    def elsewhere(self, prefixes: Mapping[str, str]) -> None:
        """A checkpoint of something larger may have the names that begin with a key of ``prefixes`` begin with its value.

        ``chosen`` moves them where it has names that begin so.
        """
        self._elsewhere.append(dict(prefixes))

    def chosen(self, names: Collection[str]) -> NameTable:
        """The table for a checkpoint of these names: with the tensors that it has in place of others, and under the names
        that it has for all.
        """
        for prefixes in self._elsewhere:
            if any(name.startswith(tuple(prefixes.values())) for name in names):
                return self._under(prefixes).chosen(names)
        table = NameTable()
        table._ignorable, table._ties, table._moved = self._ignorable, self._ties, self._moved
        for parameter, usual in self._names.items():
            others = self._instead.get(parameter, {})
            other = next((name for name in others if name in names), None)
            if other is None:
                for name in usual:
                    table._insert(name, self._parts[name])
            else:
                table._insert(other, others[other])
        return table

    def _under(self, prefixes: Mapping[str, str]) -> NameTable:
        """The same parameters under names with other beginnings."""
        table = NameTable()
        table._ignorable, table._moved = self._ignorable, dict(prefixes)
        for name, part in self._parts.items():
            table._insert(_move(name, prefixes), part)
        table._ties = {_move(name, prefixes): parameter for name, parameter in self._ties.items()}
        table._instead = {
            parameter: {_move(name, prefixes): part for name, part in others.items()}
            for parameter, others in self._instead.items()
        }
        return table

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
        usual = _move(name, {theirs: ours for ours, theirs in self._moved.items()})
        return any(pattern.fullmatch(one) for pattern in self._ignorable for one in (name, usual))

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
        """The model's weights under their checkpoint names, in the order of the table: views, but where a layout differs.

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
            yield name, part.stored(parameters[part.parameter].detach())


def _move(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
