"""NameTable: which rows of which parameter a checkpoint's tensor fills."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

IGNORABLE = (r".*\.rotary_emb\.inv_freq",)
"""Checkpoint names, in full, of what can be computed."""


@dataclasses.dataclass(frozen=True)
class StoredLayout:
    """How a matrix in a checkpoint differs in layout from its parameter."""

    rows: Callable[[], Sequence[int]] | None = None
    """Returns the row of the stored tensor for each row of the target: a permutation. None: the same order."""
    axis: int = 0
    """The axis of the target that ``rows`` permutes."""
    transposed: bool = False
    """Stored as ``[..., inputs, outputs]``; ``rows`` are those of the transpose."""
    wrapped: bool = False
    """Stored with an additional first axis of length 1."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored tensor for a target of ``shape``."""
        shape = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        return (1, *shape) if self.wrapped else shape

    def take(self, stored: torch.Tensor) -> torch.Tensor:
        """Converts the stored tensor to the layout of the parameter."""
        whole = stored.squeeze(0) if self.wrapped else stored
        whole = whole.mT if self.transposed else whole
        return whole if self.rows is None else whole.index_select(self.axis, torch.tensor(self.rows(), device=whole.device))

    def give(self, part: torch.Tensor) -> torch.Tensor:
        """Converts rows of the parameter to the stored layout: the inverse of ``take``."""
        whole = part
        if self.rows is not None:
            whole = torch.empty_like(part).index_copy_(self.axis, torch.tensor(self.rows(), device=part.device), part)
        whole = whole.mT if self.transposed else whole
        return whole.unsqueeze(0) if self.wrapped else whole


@dataclasses.dataclass(frozen=True)
class Target:
    """The target of a checkpoint's tensor: rows ``[start, stop)`` of a parameter, or all of it (``stop`` None)."""

    parameter: str
    start: int = 0
    stop: int | None = None
    index: int | None = None
    """The index into a parameter that stacks several matrices, such as experts; None: the parameter is not stacked."""
    layout: StoredLayout | None = None
    """None: the checkpoint's tensor has the layout of the rows it fills."""

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a view of the target rows."""
        whole = parameter if self.index is None else parameter[self.index]
        return whole if self.stop is None else whole[self.start : self.stop]

    def stored_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Returns the shape that the checkpoint's tensor must have."""
        shape = tuple(self.view(parameter).shape)
        return shape if self.layout is None else self.layout.stored_shape(shape)

    def fill(self, parameter: torch.Tensor, stored: torch.Tensor) -> None:
        """Copies the checkpoint's tensor to the target rows."""
        self.view(parameter).copy_(stored if self.layout is None else self.layout.take(stored))


class NameTable:
    """Maps checkpoint names to rows of parameters, for one model. Each family builds it with ``add``, ``fuse``, ``tie`` and,
    for alternative tensors of other checkpoints, ``instead``.

    Args:
        ignorable: regular expressions of checkpoint names that carry nothing to load, matched in full.
    """

    def __init__(self, ignorable: Sequence[str] = IGNORABLE) -> None:
        self._parts: dict[str, Target] = {}
        self._names: dict[str, list[str]] = {}
        self._ties: dict[str, str] = {}
        self._instead: dict[str, dict[str, Target]] = {}
        self._ignorable = [re.compile(pattern) for pattern in ignorable]
        self._elsewhere: list[dict[str, str]] = []
        self._explained: list[tuple[re.Pattern[str], str]] = []
        self._moved: dict[str, str] = {}
        self._transposable: dict[str, tuple[int, ...]] = {}

    def add(self, name: str, parameter: str, index: int | None = None, layout: StoredLayout | None = None) -> None:
        """The tensor ``name`` is the whole of ``parameter``, or of ``parameter[index]``."""
        self._insert(name, Target(parameter, index=index, layout=layout))

    def fuse(
        self,
        parameter: str,
        names: Mapping[str, int],
        index: int | None = None,
        layouts: Mapping[str, StoredLayout] | None = None,
    ) -> None:
        """The tensors ``names`` (name -> rows), one below the other in this order, are the whole of ``parameter``, or of
        ``parameter[index]``.

        Args:
            layouts: of those tensors that are laid out in another way.
        """
        start = 0
        for name, rows in names.items():
            self._insert(name, Target(parameter, start, start + rows, index, (layouts or {}).get(name)))
            start += rows

    def instead(self, name: str, parameter: str, layout: StoredLayout | None = None) -> None:
        """A checkpoint may have one tensor ``name`` in place of all those that make up ``parameter``.

        ``chosen`` takes it where it is there.
        """
        self._instead.setdefault(parameter, {})[name] = Target(parameter, layout=layout)

    def ignore(self, pattern: re.Pattern[str]) -> None:
        """Names that match in full carry nothing to load."""
        self._ignorable.append(pattern)

    def transposable(self, name: str, parameter: str, shape: tuple[int, ...]) -> None:
        """The tensor ``name`` is all of ``parameter``, of this shape or transposed, as the checkpoint's own shape shows."""
        self._transposable[name] = shape
        self._insert(name, Target(parameter, layout=StoredLayout(transposed=True)))

    def elsewhere(self, prefixes: Mapping[str, str]) -> None:
        """In the checkpoint of a larger model, names that begin with a key of ``prefixes`` may begin with its value.

        ``chosen`` renames them where the checkpoint has such names.
        """
        self._elsewhere.append(dict(prefixes))

    def explain(self, pattern: str, text: str) -> None:
        """Adds to the error of a tensor of another shape, where its name matches in full, which other models have it."""
        self._explained.append((re.compile(pattern), text))

    def explanation(self, name: str) -> str:
        """What is to be said of a tensor of another shape; empty: nothing."""
        return next((text for pattern, text in self._explained if pattern.fullmatch(name)), "")

    def chosen(self, names: Collection[str]) -> NameTable:
        """Returns the table for a checkpoint with these names, with its alternative tensors and prefixes."""
        for prefixes in self._elsewhere:
            if any(name.startswith(tuple(prefixes.values())) for name in names):
                return self._under(prefixes).chosen(names)
        table = NameTable()
        table._ignorable, table._ties, table._moved = self._ignorable, self._ties, self._moved
        table._explained = self._explained
        for parameter, usual in self._names.items():
            others = self._instead.get(parameter, {})
            other = next((name for name in others if name in names), None)
            if other is None:
                for name in usual:
                    part, plain = self._parts[name], self._transposable.get(name)
                    if plain is not None and isinstance(names, Mapping) and name in names and names[name].shape == plain:
                        part = dataclasses.replace(part, layout=None)
                    table._insert(name, part)
            else:
                table._insert(other, others[other])
        return table

    def _under(self, prefixes: Mapping[str, str]) -> NameTable:
        """Returns the table with other prefixes."""
        table = NameTable()
        table._ignorable, table._moved, table._explained = self._ignorable, dict(prefixes), self._explained
        for name, part in self._parts.items():
            table._insert(_move(name, prefixes), part)
        table._transposable = {_move(name, prefixes): shape for name, shape in self._transposable.items()}
        table._ties = {_move(name, prefixes): parameter for name, parameter in self._ties.items()}
        table._instead = {
            parameter: {_move(name, prefixes): part for name, part in others.items()}
            for parameter, others in self._instead.items()
        }
        return table

    def tie(self, name: str, parameter: str) -> None:
        """The tensor ``name`` may be in a checkpoint and must equal the tied ``parameter``; it is not loaded."""
        self._ties[name] = parameter

    def _insert(self, name: str, part: Target) -> None:
        if name in self._parts:
            raise ValueError(f"{name} is in the table already")
        self._parts[name] = part
        self._names.setdefault(part.parameter, []).append(name)

    def part(self, name: str) -> Target | None:
        """Returns the target of the checkpoint's tensor ``name``; None: the table has no such name."""
        return self._parts.get(name)

    def tied(self, name: str) -> str | None:
        """Returns the parameter that the checkpoint's tensor ``name`` must equal; None: it is not tied."""
        return self._ties.get(name)

    def ignored(self, name: str) -> bool:
        """Returns whether a checkpoint's tensor of this name is skipped."""
        usual = _move(name, {theirs: ours for ours, theirs in self._moved.items()})
        return any(pattern.fullmatch(one) for pattern in self._ignorable for one in (name, usual))

    def names(self, parameter: str) -> list[str]:
        """The checkpoint's tensors that make up ``parameter``, from its first row to its last.

        Raises:
            KeyError: the table has no such parameter.
        """
        return list(self._names[parameter])

    def items(self) -> Iterator[tuple[str, Target]]:
        """Every checkpoint name with its part."""
        yield from self._parts.items()

    def all_names(self) -> list[str]:
        """Every checkpoint name that is known, ties included."""
        return [*self._parts, *self._ties]

    def parameters(self) -> list[str]:
        """Every parameter that the table fills."""
        return list(self._names)


def _move(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
