"""Loads a model's weights tensor by tensor: reads each, copies it to its rows or packs it, and frees it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from headrace.config import Decision
from headrace.errors import ConfigError, listed
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.layers.stored import StoredMatrix
from headrace.model_spec import ModelSpec
from headrace.quant.convert import Conversion, Converter
from headrace.quant.formats.find import find_scheme
from headrace.quant.ignored import ignored
from headrace.quant.registry import find, head_quantization
from headrace.sources.files import ModelFiles
from headrace.weights.checkpoint import Checkpoint, DummyCheckpoint
from headrace.weights.matrices import load_expert, stored_experts, stored_parts
from headrace.weights.names import HEAD, NameTable, layer_names
from headrace.weights.report import LoadReport, decisions, kind_of, memory
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint
from headrace.weights.sharded import ShardedCheckpoint, is_sharded

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes there are, as stored."""


def load_weights(
    model: nn.Module,
    table: NameTable,
    files: ModelFiles,
    *,
    device: torch.device | None = None,
    quantization: str = "none",
    quantize_head: str = "auto",
    ignore: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadReport:
    """Fills the model's parameters from a checkpoint, in the parameters' dtype, and packs its matrices if asked to.

    Matrices that exist twice, in the checkpoint's form and in the model's, are together no larger than the largest.

    Args:
        model: with ``spec``, a ModelSpec. Parameters on the meta device are allocated when their values are there. Its
            ``Linear`` modules get another method where they are packed.
        table: the names of its parameters in checkpoints.
        files: what to load, as ``find_model`` returns it. Dummy: random weights from ``seed``.
        device: that is to hold the weights; None: the one that holds the parameters.
        quantization: as of ``EngineConfig``.
        quantize_head: as of ``EngineArgs``.
        ignore: ``quantization_ignore`` of ``EngineArgs``.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape than the parameter or of a type that is not
            weights (the message names it), or a matrix cannot be packed.
    """
    device = next(model.parameters()).device if device is None else device
    with closing(open_checkpoint(model, table, files, seed, device)) as checkpoint:
        loader = _Loader(model, table.chosen(checkpoint.tensors), checkpoint, device, progress)
        loader.check()
        return loader.load(quantization, head_quantization(quantize_head, quantization, device.type), ignore)


def planned_formats(
    model: nn.Module,
    table: NameTable,
    files: ModelFiles,
    *,
    device: torch.device,
    quantization: str,
    quantize_head: str = "auto",
    ignore: Sequence[str] = (),
) -> tuple[Decision, ...]:
    """Returns what ``load_weights`` would report of number formats on a device that need not be here.

    Args:
        model: on the meta device. It is of no use afterwards.
        device: of which the type counts.

    Raises:
        ConfigError: as ``load_weights``, for what shows without values.
    """
    with closing(open_checkpoint(model, table, files, 0, torch.device("cpu"))) as checkpoint:
        loader = _Loader(model, table.chosen(checkpoint.tensors), checkpoint, device, None)
        loader.check()
        return loader.plan(quantization, head_quantization(quantize_head, quantization, device.type), ignore)


def open_checkpoint(
    model: nn.Module,
    table: NameTable,
    files: ModelFiles,
    seed: int,
    device: torch.device,
    packed: Mapping[str, torch.Tensor] | None = None,
) -> Checkpoint:
    """Opens the files of a model, as ``load_weights`` takes them. ``packed``: tensors like the parameters that layers hold in
    another form by now."""
    own: ModelSpec = model.spec  # type: ignore[assignment]
    if files.kind == "safetensors" and is_sharded(files.weight_files):
        return ShardedCheckpoint(files.weight_files, own.whole)
    if files.kind == "safetensors":
        return ScaledCheckpoint(SafetensorsCheckpoint(files.weight_files), find_scheme(files.config), device)
    if files.kind == "gguf":
        from headrace.weights.gguf import GGUFCheckpoint

        (file,) = files.weight_files
        return GGUFCheckpoint(file, own.whole, [*table.all_names(), *table.alternatives()])
    parameters = {**dict(model.named_parameters()), **(packed or {})}
    like = {
        name: torch.empty(part.stored_shape(held), dtype=held.dtype, device="meta")
        for name, part in table.items()
        if (held := parameters.get(part.parameter)) is not None
    }
    return DummyCheckpoint(like, seed, device)


class Room:
    """Bytes that threads share, which wait until there are enough. One that asks for more than there are gets all of them."""

    def __init__(self, nbytes: int) -> None:
        self._whole = nbytes
        self._free = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        nbytes = min(nbytes, self._whole)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()


class _Choice(NamedTuple):
    """The matrices of a model, and the decisions on how they are held."""

    linears: Mapping[str, Linear]
    mixtures: Mapping[str, Experts]
    converters: dict[str, Converter]
    """Converters of linear layers by their paths; layers without one are loaded in their present format."""
    conversions: dict[str, Conversion]
    """Decisions so far: on layers that the user leaves in floats, and on mixtures."""


class _Loader:
    def __init__(
        self, model: nn.Module, table: NameTable, checkpoint: Checkpoint, device: torch.device, progress: Progress | None
    ) -> None:
        self._model = model
        self._table = table
        self._checkpoint = checkpoint
        self._parameters = dict(model.named_parameters())
        self._device = device
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self._total = sum(self._nbytes(name) for name in checkpoint.tensors)

    def check(self) -> None:
        """Checks that every tensor has a target of its shape and every parameter has its tensors, before reading any."""
        tensors = self._checkpoint.tensors
        places = {name for name, _ in self._table.items()}
        unfilled = self._parameters.keys() - set(self._table.parameters())
        if unfilled:
            raise ConfigError(f"no tensor of a checkpoint fills the model's parameter {min(unfilled)}", "model")
        if missing := [name for name in places if name not in tensors]:
            raise ConfigError(f"the checkpoint lacks {listed(sorted(missing))}", "model")
        unexpected = sorted(
            f"{name} ({tensors[name].origin})"
            for name in tensors
            if name not in places
            and self._table.tied(name) is None
            and not self._table.ignored(name)
            and not self._checkpoint.may_be_left_out(name)
        )
        if unexpected:
            raise ConfigError(f"the checkpoint has tensors that the model has no place for: {listed(unexpected)}", "model")
        for name, part in self._table.items():
            self._check_shape(name, part.stored_shape(self._parameters[part.parameter]))
        for name in tensors:
            if tied := self._table.tied(name):
                self._check_shape(name, self._table.tied_part(name).stored_shape(self._parameters[tied]))

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        stored = self._checkpoint.tensors[name]
        if stored.shape != expected:
            why = self._table.explanation(name)
            raise ConfigError(
                f"{name} ({stored.origin}) has the shape {list(stored.shape)}, but the model's configuration means "
                f"{list(expected)}{f': {why}' if why else ''}",
                "model",
            )

    def _choose(self, quantization: str, head: str, ignore: Sequence[str], *, planned: bool = False) -> _Choice:
        """Mixtures get their methods, which allocate before they load."""
        linears = {path: module for path, module in self._model.named_modules() if isinstance(module, Linear)}
        mixtures = {path: module for path, module in self._model.named_modules() if isinstance(module, Experts)}
        held = {name: find(name, self._device.type) for name in dict.fromkeys((quantization, head)) if name != "none"}
        converters = {name: Converter(self._device, each, planned=planned) for name, each in held.items()}
        left = ignored(ignore, layer_names(self._table, (*linears, *mixtures))) if converters and ignore else {}
        conversions = {path: Conversion("floats", why, 0.0) for path, why in left.items()}
        if quantization in converters:
            asked = {path: layer for path, layer in mixtures.items() if path not in left}
            conversions |= self._prepare(asked, converters[quantization])
        tied = linears[HEAD].weight is not self._parameters.get(f"{HEAD}.weight") if HEAD in linears else False
        chosen: dict[str, Converter] = {}
        for path in linears:
            name = head if path == HEAD else quantization
            if path not in left and name in converters and not (path == HEAD and tied and not held[name].rounding):
                chosen[path] = converters[name]
        return _Choice(linears, mixtures, chosen, conversions)

    @torch.no_grad()
    def plan(self, quantization: str, head: str, ignore: Sequence[str]) -> tuple[Decision, ...]:
        """Returns what ``load`` would decide for a model on the meta device. One of the layers that are alike in shapes and
        number formats is examined, which reads its codes from the checkpoint."""
        linears, _, converters, conversions = self._choose(quantization, head, ignore, planned=True)
        parameters = {id(value): name for name, value in self._parameters.items()}
        known: dict[object, Conversion] = {}
        for path, converter in converters.items():
            layer = linears[path]
            stored = [part for name in self._table.names(parameters[id(layer.weight)]) for part in self._stored(name)]
            alike = kind_of(path), layer.in_features, layer.out_features, *((part.kind, part.spec) for part in stored)
            if alike not in known:
                known[alike] = converter.convert(path, layer, stored, is_head=path == HEAD)
            conversions[path] = known[alike]
        return (*self._checkpoint.decisions(), *decisions(conversions, planned=True))

    @torch.no_grad()
    def load(self, quantization: str, head: str, ignore: Sequence[str]) -> LoadReport:
        """``head``: the quantization of the output head."""
        start = time.perf_counter()
        linears, mixtures, converters, conversions = self._choose(quantization, head, ignore)
        matrices = {f"{path}.weight" for path in linears}
        experts = {f"{path}.{matrix}": layer for path, layer in mixtures.items() for matrix in layer.shapes}
        for parameter in self._table.parameters():
            if parameter not in matrices:
                self._fill(parameter, experts.get(parameter))
        for path in mixtures.keys() & conversions.keys():
            conversions[path] = dataclasses.replace(conversions[path], error=mixtures[path].method.error())
        for path, linear in linears.items():
            if path not in converters:
                self._load(path, linear)
        self._check_ties()
        conversions |= self._pack({path: linears[path] for path in converters}, converters)
        self._progress(self._total, self._total)
        return LoadReport(
            seconds=time.perf_counter() - start,
            nbytes_read=self._total,
            num_tensors=len(self._checkpoint.tensors),
            quantization=quantization,
            memory=memory(self._model),
            errors={f"{path}.weight": conversion.error for path, conversion in conversions.items()},
            decisions=(*self._checkpoint.decisions(), *decisions(conversions)),
        )

    def _prepare(self, mixtures: dict[str, Experts], converter: Converter) -> dict[str, Conversion]:
        """Chooses the methods of experts, which allocate before they load."""
        found = {
            path: converter.prepare(layer, stored_experts(self._checkpoint, self._table, path, layer))
            for path, layer in mixtures.items()
        }
        self._parameters = dict(self._model.named_parameters())
        return {path: conversion for path, conversion in found.items() if conversion is not None}

    def _fill(self, parameter: str, experts: Experts | None) -> None:
        """``experts``: whose matrix it is; None: it is not a matrix."""
        self._allocate(self._parameters.get(parameter))
        for name in self._table.names(parameter):
            part = self._table.part(name)
            if part is None or part.empty:
                continue
            if experts is not None:
                load_expert(self._checkpoint, name, part, experts, parameter.rpartition(".")[2])
            else:
                held = part.read(partial(self._checkpoint.read, name))
                part.view(self._parameters[parameter]).copy_(held)
            self._read(name)

    def _allocate(self, parameter: nn.Parameter | None) -> None:
        """Allocates a parameter in place, so that what is tied to it has it too."""
        if parameter is not None and parameter.is_meta and self._device.type != "meta":
            # Not empty_like, which imports sympy for tensors on the meta device.
            held = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            values = nn.Parameter(held, requires_grad=False)
            torch.utils.swap_tensors(parameter, values)  # type: ignore[no-untyped-call]

    def _load(self, path: str, layer: Linear) -> None:
        """Loads the weights in the layer's present format."""
        if self._parameters.get(f"{path}.weight") is layer.weight:
            self._allocate(layer.weight)
            names = self._table.names(f"{path}.weight")
            layer.method.load(layer, [part for name in names for part in self._stored(name)])
            for name in names:
                self._read(name)

    def _pack(self, linears: dict[str, Linear], converters: dict[str, Converter]) -> dict[str, Conversion]:
        """Packs one matrix per thread, since the steps of packing are too small to parallelise. Those that are packed at a time
        are together no larger than the largest parameter."""
        parameters = {id(value): name for name, value in self._parameters.items()}
        of = {path: parameters[id(layer.weight)] for path, layer in linears.items()}

        room = Room(max(parameter.nbytes for parameter in self._parameters.values()))

        @torch.no_grad()
        def convert(path: str) -> Conversion:
            with room.hold(linears[path].weight.nbytes):
                stored = [part for name in self._table.names(of[path]) for part in self._stored(name)]
                return converters[path].convert(path, linears[path], stored, is_head=path == HEAD)

        conversions = {}
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for path, conversion in zip(linears, pool.map(convert, linears), strict=True):
                conversions[path] = conversion
                if of[path] == f"{path}.weight":
                    if "weight" not in linears[path]._parameters:
                        del self._parameters[of[path]]
                    for name in self._table.names(of[path]):
                        self._read(name)
        return conversions

    def _stored(self, name: str) -> list[StoredMatrix]:
        return stored_parts(self._checkpoint, name, self._table.part(name))

    def _check_ties(self) -> None:
        """Checks that a tied tensor in the checkpoint equals what it is tied to."""
        for name in self._checkpoint.tensors:
            parameter = self._table.tied(name)
            if parameter is None:
                continue
            value = self._parameters[parameter]
            stored = self._table.tied_part(name).read(partial(self._checkpoint.read, name))
            if not torch.equal(stored.to(value.dtype), value):
                raise ConfigError(
                    f"the model's configuration ties {name} to {parameter}, but the checkpoint's two differ: "
                    "set tie_word_embeddings to false in its config.json",
                    "model",
                )
            self._read(name)

    def _nbytes(self, name: str) -> int:
        """Bytes to read of a tensor."""
        target = self._table.tied_part(name) if self._table.tied(name) else self._table.part(name)
        return int(self._checkpoint.tensors[name].nbytes * (1.0 if target is None else target.share))

    def _read(self, name: str) -> None:
        self._done += self._nbytes(name)
        self._progress(min(self._done, self._total), self._total)
