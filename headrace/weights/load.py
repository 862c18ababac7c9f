"""Loads a model's weights, tensor by tensor: each is read, put in its rows or packed, and let go."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from headrace.config import Decision
from headrace.errors import ConfigError
from headrace.kernels import native
from headrace.layers.linear import Linear
from headrace.quant.convert import Conversion, Converter, Piece
from headrace.quant.hybrid import HybridLinear
from headrace.quant.packed import PackedLinear
from headrace.sources.files import ModelFiles
from headrace.spec import ModelSpec
from headrace.weights.checkpoint import Checkpoint, DummyCheckpoint
from headrace.weights.gguf import GGUFCheckpoint
from headrace.weights.names import NameTable
from headrace.weights.report import LoadReport, RoundingError, WeightMemory
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint
from headrace.weights.sharded import ShardedCheckpoint, is_sharded

HEAD = "lm_head"
"""The module that makes logits of hidden states."""

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes there are, as stored."""


def load_weights(
    model: nn.Module,
    table: NameTable,
    files: ModelFiles,
    *,
    quantization: str = "none",
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadReport:
    """Fills the model's parameters from a checkpoint, in the parameters' dtype, and packs its matrices if asked to.

    At no time does more than one matrix exist twice.

    Args:
        model: with ``spec``, a ModelSpec, and its parameters allocated. Its ``Linear`` modules are replaced where they
            are packed.
        table: the names of its parameters in checkpoints.
        files: what to load, as ``find_model`` returns it. Dummy: random weights from ``seed``.
        quantization: none, int8 or int4.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape than the parameter or of a type that is not
            weights (the message names it), or a matrix cannot be packed.
    """
    with _open(model, table, files, seed) as checkpoint:
        loader = _Loader(model, table.chosen(checkpoint.tensors), checkpoint, progress)
        loader.check()
        return loader.load(quantization)


@contextmanager
def _open(model: nn.Module, table: NameTable, files: ModelFiles, seed: int) -> Iterator[Checkpoint]:
    with ExitStack() as stack:
        spec: ModelSpec = model.spec  # type: ignore[assignment]
        if files.kind == "safetensors":
            checkpoint = _open_safetensors(files, spec, next(model.parameters()).device)
            stack.callback(checkpoint.close)
            yield checkpoint
        elif files.kind == "gguf":
            (file,) = files.weight_files
            yield GGUFCheckpoint(file, spec, table.all_names())
        else:
            parameters = dict(model.named_parameters())
            shapes = {name: part.stored_shape(parameters[part.parameter]) for name, part in table.items()}
            yield DummyCheckpoint(shapes, seed, next(iter(parameters.values())).device)


def _open_safetensors(
    files: ModelFiles, spec: ModelSpec, device: torch.device
) -> SafetensorsCheckpoint | ShardedCheckpoint | ScaledCheckpoint:
    if is_sharded(files.weight_files):
        return ShardedCheckpoint(files.weight_files, spec)
    checkpoint = SafetensorsCheckpoint(files.weight_files)
    scheme = getattr(files.config, "quantization_config", None)
    if scheme is None:
        return checkpoint
    tile = scheme.get("weight_block_size")
    return ScaledCheckpoint(checkpoint, None if tile is None else (tile[0], tile[1]), device)


class _Loader:
    def __init__(self, model: nn.Module, table: NameTable, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self._model = model
        self._table = table
        self._checkpoint = checkpoint
        self._parameters = dict(model.named_parameters())
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self._total = sum(stored.nbytes for stored in checkpoint.tensors.values())

    def check(self) -> None:
        """Every tensor has a place of its shape and every parameter has its tensors, before any is read."""
        tensors = self._checkpoint.tensors
        places = {name for name, _ in self._table.items()}
        unfilled = self._parameters.keys() - set(self._table.parameters())
        if unfilled:
            raise ConfigError(f"no tensor of a checkpoint fills the model's parameter {min(unfilled)}", "model")
        if missing := [name for name in places if name not in tensors]:
            raise ConfigError(f"the checkpoint lacks {_listed(missing)}", "model")
        unexpected = [
            f"{name} ({tensors[name].origin})"
            for name in tensors
            if name not in places and self._table.tied(name) is None and not self._table.ignored(name)
        ]
        if unexpected:
            raise ConfigError(f"the checkpoint has tensors that the model has no place for: {_listed(unexpected)}", "model")
        for name, part in self._table.items():
            self._check_shape(name, part.stored_shape(self._parameters[part.parameter]))
        for name in tensors:
            if tied := self._table.tied(name):
                self._check_shape(name, tuple(self._parameters[tied].shape))

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        stored = self._checkpoint.tensors[name]
        if stored.shape != expected:
            raise ConfigError(
                f"{name} ({stored.origin}) has the shape {list(stored.shape)}, but the model's configuration means "
                f"{list(expected)}",
                "model",
            )

    @torch.no_grad()
    def load(self, quantization: str) -> LoadReport:
        start = time.perf_counter()
        kernels = native.load()
        converter = None if quantization == "none" else Converter(quantization, kernels)
        linears = {path: module for path, module in self._model.named_modules() if isinstance(module, Linear)}
        packed: dict[str, Linear] = {} if converter is None else linears
        skipped = {f"{path}.weight" for path in packed}
        for parameter in self._table.parameters():
            if parameter not in skipped:
                self._fill(parameter)
        self._check_ties()
        conversions: dict[str, Conversion] = {}
        for path, linear in packed.items():
            if converter is not None:
                conversions[path] = self._pack(path, linear, converter)
        self._progress(self._total, self._total)
        return LoadReport(
            seconds=time.perf_counter() - start,
            nbytes_read=self._total,
            num_tensors=len(self._checkpoint.tensors),
            quantization=quantization,
            memory=_memory(self._model),
            errors=tuple(
                RoundingError(f"{path}.weight", conversion.module.format, conversion.error)
                for path, conversion in conversions.items()
            ),
            decisions=_decisions(conversions),
        )

    def _fill(self, parameter: str) -> None:
        target = self._parameters[parameter]
        for name in self._table.names(parameter):
            part = self._table.part(name)
            if part is not None:
                part.fill(target, self._checkpoint.read(name))
            self._read(name)

    def _pack(self, path: str, linear: Linear, converter: Converter) -> Conversion:
        parameter = next(name for name, value in self._parameters.items() if value is linear.weight)
        names = self._table.names(parameter)
        pieces = [self._piece(name) for name in names]
        conversion = converter.convert(path, linear, pieces, is_head=path == HEAD)
        if path == HEAD:
            # Logits are wanted in float32: what the product rounded away could not be had back.
            conversion.module.out_dtype = torch.float32
        self._model.set_submodule(path, conversion.module)
        if parameter == f"{path}.weight":
            del self._parameters[parameter]
            for name in names:
                self._read(name)
        return conversion

    def _piece(self, name: str) -> Piece:
        checkpoint, part = self._checkpoint, self._table.part(name)
        kind, layout = checkpoint.tensors[name].kind, None if part is None else part.layout
        if layout is None:
            return Piece(kind, checkpoint.codes(name), lambda: checkpoint.read(name))
        return Piece(kind, None, lambda: layout.take(checkpoint.read(name)))

    def _check_ties(self) -> None:
        """A tied tensor that the checkpoint has nevertheless must be what it is tied to."""
        for name in self._checkpoint.tensors:
            parameter = self._table.tied(name)
            if parameter is None:
                continue
            held = self._parameters[parameter]
            if not torch.equal(self._checkpoint.read(name).to(held.dtype), held):
                raise ConfigError(
                    f"the model's configuration ties {name} to {parameter}, but the checkpoint's two differ: "
                    "set tie_word_embeddings to false in its config.json",
                    "model",
                )
            self._read(name)

    def _read(self, name: str) -> None:
        self._done += self._checkpoint.tensors[name].nbytes
        self._progress(min(self._done, self._total), self._total)


def _listed(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def _memory(model: nn.Module) -> tuple[WeightMemory, ...]:
    """Where the weights' bytes are. Tied ones count once."""
    plain = sum(parameter.nbytes for parameter in model.parameters())
    dtypes = " and ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}))
    lines = [WeightMemory("weights", plain, dtypes)]
    packed: dict[str, int] = {}
    copies = 0
    for module in model.modules():
        if isinstance(module, HybridLinear):
            copies += module.copy_nbytes
        elif isinstance(module, PackedLinear):
            packed[module.format] = packed.get(module.format, 0) + module.nbytes
    lines += [WeightMemory("packed weights", nbytes, how) for how, nbytes in packed.items()]
    if copies:
        lines.append(WeightMemory("second copy of packed weights", copies, "for prompts and large batches"))
    return tuple(lines)


def _decisions(conversions: dict[str, Conversion]) -> tuple[Decision, ...]:
    """One for each kind of matrix: those of all layers that were treated alike are one line."""
    alike: dict[tuple[str, str, str], list[float]] = {}
    for path, conversion in conversions.items():
        kind = re.sub(r"\.\d+\.", ".*.", path)
        alike.setdefault((kind, conversion.module.format, conversion.reason), []).append(conversion.error)
    out = []
    for (kind, how, reason), errors in alike.items():
        error = f"relative error at most {max(errors):.1e}" if max(errors) > 0 else "no rounding of weights"
        count = f" ({len(errors)} layers)" if "*" in kind else ""
        out.append(Decision(f"format of {kind}{count}", how, f"{reason}; {error}"))
    return tuple(out)
