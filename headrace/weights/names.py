"""NameTable: which rows of which parameter a checkpoint's tensor fills."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

ReadSlice = Callable[["Slice | None"], torch.Tensor]
"""Reads a part of a stored tensor, or with None all of it."""
HEAD = "lm_head"
"""Path of the output head."""
IGNORABLE = (r".*\.rotary_emb\.inv_freq",)
"""Checkpoint names, in full, of what can be computed."""


@dataclasses.dataclass(frozen=True)
class StoredLayout:
    """Differences in layout of a matrix in a checkpoint from its parameter."""

    rows: Callable[[], Sequence[int]] | None = None
    """Returns the row of the stored tensor for each row of the target: a permutation. None: the same order."""
    axis: int = 0
    """The axis of the target that ``rows`` permutes."""
    transposed: bool = False
    """Stored as ``[..., inputs, outputs]``; ``rows`` are those of the transpose."""
    ones: tuple[int, ...] = ()
    """Axes of length 1 that the stored tensor has besides, ascending."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored tensor for a target of ``shape``."""
        shape = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        for axis in self.ones:
            shape = (*shape[:axis], 1, *shape[axis:])
        return shape

    def take(self, stored: torch.Tensor) -> torch.Tensor:
        """Converts the stored tensor to the layout of the parameter."""
        whole = stored.squeeze(self.ones) if self.ones else stored
        whole = whole.mT if self.transposed else whole
        return whole if self.rows is None else whole.index_select(self.axis, torch.tensor(self.rows(), device=whole.device))

    def give(self, part: torch.Tensor) -> torch.Tensor:
        """Converts rows of the parameter to the stored layout: the inverse of ``take``."""
        whole = part
        if self.rows is not None:
            whole = torch.empty_like(part).index_copy_(self.axis, torch.tensor(self.rows(), device=part.device), part)
        whole = whole.mT if self.transposed else whole
        return whole.view(self.stored_shape(tuple(part.shape))) if self.ones else whole


@dataclasses.dataclass(frozen=True)
class Slice:
    """Ranges ``[start, stop)`` of a stored tensor along one axis, ascending."""

    axis: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranges, one behind the other."""
        parts = [tensor.narrow(self.axis, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)


@dataclasses.dataclass(frozen=True)
class ParameterCut(Slice):
    """One rank's part of a parameter: ranges along one axis, and zeros behind them."""

    padding: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPart(ParameterCut):
    """A tensor-parallel rank's part of a matrix or vector, in the layout of the parameter."""

    shape: tuple[int, ...]
    """Shape of the whole matrix or vector."""

    def read(self, read: ReadSlice, layout: StoredLayout | None) -> torch.Tensor:
        """Reads the part of a stored tensor, and no more where the layout allows it."""
        if not self.ranges:
            return torch.zeros(self._shape(self.padding))
        if layout is None:
            held = read(self)
        elif layout.ones:
            held = self.of(layout.take(read(None)))
        else:
            held = self._read_in_layout(read, layout)
        if not self.padding:
            return held
        return torch.cat((held, held.new_zeros(self._shape(self.padding))), dim=self.axis)

    def _read_in_layout(self, read: ReadSlice, layout: StoredLayout) -> torch.Tensor:
        axis, last = self.axis, len(self.shape) - 1
        if layout.transposed and axis >= last - 1:
            axis = last if axis == last - 1 else last - 1
        if layout.rows is None or layout.axis != self.axis:
            return layout.take(read(Slice(axis, self.ranges)))
        order = torch.tensor(layout.rows())
        wanted = torch.cat([order[start:stop] for start, stop in self.ranges])
        stored, place = wanted.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        held = read(Slice(axis, _ranges(stored)))
        held = held.mT if layout.transposed else held
        return held.index_select(self.axis, place.to(held.device))

    def _shape(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])


def _ranges(ascending: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as ranges ``[start, stop)``."""
    breaks = (ascending.diff() != 1).nonzero().flatten() + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in ascending.tensor_split(breaks))


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
    part: RankPart | None = None
    """Part of the checkpoint's tensor that goes there, in the layout of the parameter; None: all of it."""

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a view of the target rows."""
        whole = parameter if self.index is None else parameter[self.index]
        return whole if self.stop is None else whole[self.start : self.stop]

    def stored_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Returns the shape that the checkpoint's tensor must have."""
        shape = tuple(self.view(parameter).shape) if self.part is None else self.part.shape
        return shape if self.layout is None else self.layout.stored_shape(shape)

    def fill(self, parameter: torch.Tensor, stored: torch.Tensor) -> None:
        """Copies the checkpoint's tensor to the target rows."""
        if not self.empty:
            self.view(parameter).copy_(self.take(stored))

    def take(self, stored: torch.Tensor) -> torch.Tensor:
        """Converts the checkpoint's tensor to what goes to the target rows."""
        return self.read(lambda where: stored if where is None else where.of(stored))

    def read(self, read: ReadSlice) -> torch.Tensor:
        """Reads what goes to the target rows, and no more where the layout allows it."""
        if self.part is not None:
            return self.part.read(read, self.layout)
        stored = read(None)
        return stored if self.layout is None else self.layout.take(stored)

    def matrix_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Returns outputs and inputs of the checkpoint's matrix, whose target is in a parameter ``[outputs, inputs]``."""
        if self.part is not None:
            return self.part.shape[-2], self.part.shape[-1]
        return (outputs if self.stop is None else self.stop - self.start), inputs

    def low_rank(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts factors of an addition ``b a`` to the checkpoint's matrix to those of an addition to the target rows.

        Args:
            a: ``[rank, inputs]``, or ``[experts, rank, inputs]`` of matrices that are stacked.
            b: ``[outputs, rank]`` likewise.
        """
        layout, part, inputs, outputs = self.layout, self.part, a.ndim - 1, a.ndim - 2
        if layout is not None and layout.rows is not None:
            rows = torch.tensor(layout.rows())
            if layout.axis == inputs:
                a = a.index_select(inputs, rows)
            else:
                b = b.index_select(outputs, rows)
        if part is None:
            return a, b
        if part.axis == inputs:
            return Slice(inputs, part.ranges).of(a), b
        if part.axis == outputs:
            return a, Slice(outputs, part.ranges).of(b)
        held = Slice(0, part.ranges)
        return held.of(a), held.of(b)

    @property
    def share(self) -> float:
        """Share of the checkpoint's tensor that goes there, 0 to 1."""
        if self.part is None:
            return 1.0
        return sum(stop - start for start, stop in self.part.ranges) / self.part.shape[self.part.axis]

    @property
    def empty(self) -> bool:
        """Nothing of the checkpoint's tensor goes there, nor anything in its place."""
        return self.part is not None and not self.part.ranges and not self.part.padding

    def cut(self, cut: ParameterCut, shape: tuple[int, ...]) -> Target:
        """The target in what a rank holds of the parameter, which is of ``shape`` as a whole."""
        axis, shape = cut.axis, tuple(self.view(torch.empty(shape, device="meta")).shape)
        if self.index is not None:
            if axis == 0:
                return self._cut_stack(cut, shape)
            axis -= 1
        if self.stop is None or axis != 0:
            return dataclasses.replace(self, part=RankPart(axis, cut.ranges, cut.padding, shape=shape))
        at, first, ranges = 0, None, []
        for start, stop in cut.ranges:
            low, high = max(start, self.start), min(stop, self.stop)
            if low < high:
                first = at + low - start if first is None else first
                ranges.append((low - self.start, high - self.start))
            at += stop - start
        first = first or 0
        count = sum(stop - start for start, stop in ranges)
        return dataclasses.replace(self, start=first, stop=first + count, part=RankPart(axis, tuple(ranges), shape=shape))

    def _cut_stack(self, cut: ParameterCut, shape: tuple[int, ...]) -> Target:
        """Cuts a parameter that stacks matrices, of which a rank holds some."""
        at, index = 0, self.index or 0
        for start, stop in cut.ranges:
            if start <= index < stop:
                return dataclasses.replace(self, index=at + index - start)
            at += stop - start
        return dataclasses.replace(self, start=0, stop=0, index=None, part=RankPart(0, (), shape=shape))


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
        self._instead: dict[str, list[dict[str, Target]]] = {}
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

    def instead(self, names: str | Mapping[str, int], parameter: str, layout: StoredLayout | None = None) -> None:
        """A checkpoint may have one tensor, or several (name -> rows), in place of all those that make up ``parameter``.

        ``chosen`` takes them where one is there.
        """
        if isinstance(names, str):
            group = {names: Target(parameter, layout=layout)}
        else:
            ends = list(itertools.accumulate(names.values()))
            group = {
                name: Target(parameter, end - names[name], end, None, layout) for name, end in zip(names, ends, strict=True)
            }
        self._instead.setdefault(parameter, []).append(group)

    def ignore(self, pattern: re.Pattern[str]) -> None:
        """Names that match in full carry nothing to load."""
        self._ignorable.append(pattern)

    def transposable(self, name: str, parameter: str, shape: tuple[int, ...]) -> None:
        """The tensor ``name`` is all of ``parameter``, of this shape or transposed, as the checkpoint's own shape shows."""
        self._transposable[name] = shape
        self._insert(name, Target(parameter, layout=StoredLayout(transposed=True)))

    def elsewhere(self, prefixes: Mapping[str, str]) -> None:
        """Lets names in the checkpoint of a larger model begin with a value of ``prefixes`` in place of its key.

        ``chosen`` renames them where the checkpoint has such names.
        """
        self._elsewhere.append(dict(prefixes))

    def explain(self, pattern: str, text: str) -> None:
        """Adds to the error of a tensor of another shape, where its name matches in full, which other models have it."""
        self._explained.append((re.compile(pattern), text))

    def explanation(self, name: str) -> str:
        """Returns the text that the error of a tensor of another shape adds; empty: none."""
        return next((text for pattern, text in self._explained if pattern.fullmatch(name)), "")

    def chosen(self, names: Collection[str]) -> NameTable:
        """Returns the table for a checkpoint with these names, with its alternative tensors and prefixes."""
        for prefixes in self._elsewhere:
            if any(name.startswith(tuple(prefixes.values())) for name in names):
                return self._under(prefixes).chosen(names)
        table = self._emptied()
        for parameter, usual in self._names.items():
            groups = [*self._instead.get(parameter, []), {name: self._parts[name] for name in usual}]
            whole = next((group for group in groups if all(name in names for name in group)), None)
            group = whole or next((group for group in groups if any(name in names for name in group)), groups[-1])
            for name, part in group.items():
                plain = self._transposable.get(name)
                if plain is not None and isinstance(names, Mapping) and name in names and names[name].shape == plain:
                    part = dataclasses.replace(part, layout=None)
                table._insert(name, part)
        return table

    def _emptied(self) -> NameTable:
        """A table without tensors that knows the same ties and ignores the same names."""
        table = NameTable(())
        table._ignorable, table._explained = self._ignorable, self._explained
        table._ties, table._moved = self._ties, self._moved
        return table

    def _mapped(self, rename: Callable[[str], str], change: Callable[[Target], Target]) -> NameTable:
        """Returns the table with other names and targets."""
        table = self._emptied()
        for name, part in self._parts.items():
            table._insert(rename(name), change(part))
        table._transposable = {rename(name): shape for name, shape in self._transposable.items()}
        table._ties = {rename(name): parameter for name, parameter in self._ties.items()}
        table._instead = {
            parameter: [{rename(name): change(part) for name, part in group.items()} for group in others]
            for parameter, others in self._instead.items()
        }
        return table

    def _under(self, prefixes: Mapping[str, str]) -> NameTable:
        """Returns the table with other prefixes."""
        table = self._mapped(lambda name: _move(name, prefixes), lambda part: part)
        table._moved = dict(prefixes)
        return table

    def sharded(self, cuts: Mapping[str, ParameterCut], shapes: Mapping[str, tuple[int, ...]]) -> NameTable:
        """Returns the table for what a rank holds.

        Args:
            cuts: by parameter; those without one are held whole.
            shapes: of the whole parameters.
        """

        def cut(part: Target) -> Target:
            own = cuts.get(part.parameter)
            return part if own is None else part.cut(own, shapes[part.parameter])

        table = self._mapped(lambda name: name, cut)
        table._elsewhere = self._elsewhere
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

    def ties(self) -> dict[str, str]:
        """Every tied name with the parameter that it must equal."""
        return dict(self._ties)

    def ignored(self, name: str) -> bool:
        """Returns whether a checkpoint's tensor of this name is skipped."""
        usual = _move(name, {theirs: ours for ours, theirs in self._moved.items()})
        return any(pattern.fullmatch(one) for pattern in self._ignorable for one in (name, usual))

    def tied_part(self, name: str) -> Target:
        """Returns the target of the tensor that the tied one must equal."""
        return self._parts[self._names[self._ties[name]][0]]

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

    def alternatives(self) -> list[str]:
        """Every name of a tensor that a checkpoint may have in place of others."""
        return [name for groups in self._instead.values() for group in groups for name in group]

    def parameters(self) -> list[str]:
        """Every parameter that the table fills."""
        return list(self._names)


def layer_names(table: NameTable, layers: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names that a layer's matrices have in checkpoints, without ``.weight``, by its path, and the path."""
    names = {path: [path] for path in layers}
    for parameter in table.parameters():
        if (path := parameter.rpartition(".")[0]) in names:
            names[path] += [name.removesuffix(".weight") for name in table.names(parameter) if not name.endswith("bias")]
    return names


def _move(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
