"""Holds the matrices of a model of transformers in another number format, by the methods of native models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.models.capture import one_line
from headrace.models.fallback.transformers.fuse import FusedPart
from headrace.models.fallback.transformers.kernel_substitution import MatrixProduct
from headrace.models.fallback.transformers.model import PackedMatrix, TransformersModel
from headrace.models.fallback.transformers.verify import run
from headrace.quant.convert import Conversion, Converter
from headrace.quant.formats.find import find_scheme
from headrace.quant.ignored import ignored
from headrace.quant.registry import find
from headrace.sources.files import ModelFiles
from headrace.weights.checkpoint import Checkpoint
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint

_ROUTERS = frozenset({"gate", "router"})
"""Components of the paths of routers, which stay floats: a small error of a score chooses another expert."""


class _Matrix(NamedTuple):
    layer: Linear
    """The layer that multiplies it."""
    modules: Mapping[str, nn.Linear]
    """Modules that share the product, one below the other in the matrix, by path."""

    @property
    def name(self) -> str:
        """The modules' path, with the last components of all of them."""
        folder, _, _ = next(iter(self.modules)).rpartition(".")
        return f"{folder}.{'+'.join(path.rpartition('.')[2] for path in self.modules)}"


def packable(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns the linear modules that may be held in another number format, by path: all but routers and the output head."""
    head = model.get_output_embeddings()
    return {
        path: module
        for path, module in model.named_modules()
        if type(module) in (nn.Linear, FusedPart) and module is not head and _ROUTERS.isdisjoint(path.split("."))
    }


def pack(model: TransformersModel, files: ModelFiles, config: EngineConfig) -> dict[str, Conversion]:
    """Packs the matrices that ``substitute_kernels`` has made the engine's to multiply. Those of a quantised checkpoint
    stay as they are stored where they have their module's name.

    Args:
        files: from which the model was loaded.

    Returns:
        The format of each matrix; empty without a quantization.

    Raises:
        ConfigError: a matrix cannot be held so, or the model's code reads a weight itself.
    """
    if config.quantization == "none":
        return {}
    asked, scheme = (config.quantization, config.args.quantization_ignore), find_scheme(files.config)
    if scheme is None or files.kind == "dummy":
        return _packed(model, *asked, None)
    with closing(ScaledCheckpoint(SafetensorsCheckpoint(files.weight_files), scheme, config.device)) as checkpoint:
        return _packed(model, *asked, checkpoint)


@torch.inference_mode()
def _packed(
    model: TransformersModel, quantization: str, ignore: Sequence[str], checkpoint: Checkpoint | None
) -> dict[str, Conversion]:
    matrices = {one.name: one for one in _matrices(packable(model.foreign))}
    names = {name: [f"{path}.weight" for path in one.modules] for name, one in matrices.items()}
    left = ignored(ignore, names) if ignore else {}
    device = next(model.foreign.parameters()).device
    converter = Converter(device, find(quantization, device.type))

    @torch.inference_mode()
    def convert(name: str) -> Conversion:
        if name in left:
            return Conversion("floats", left[name], 0.0)
        one = matrices[name]
        return converter.convert(name, one.layer, [_stored(path, module, checkpoint) for path, module in one.modules.items()])

    # One matrix per thread, since the steps of packing are too small to parallelise.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        conversions = dict(zip(matrices, pool.map(convert, matrices), strict=True))
    for one in matrices.values():
        if "weight" not in one.layer._parameters:
            model.packed.append(PackedMatrix(one.layer, {path: part.out_features for path, part in one.modules.items()}))
            for module in one.modules.values():
                module.register_parameter("weight", None)
                module.register_parameter("bias", None)
    try:
        run(model)
    except Exception as error:
        raise ConfigError(
            f"quantization {quantization}: the model's own code does not run without weights that are floats "
            f"({one_line(error)}): set quantization none, or name its module in quantization_ignore",
            "quantization",
        ) from error
    return conversions


def _matrices(modules: Mapping[str, nn.Linear]) -> Iterable[_Matrix]:
    groups: dict[Linear, dict[int, tuple[str, nn.Linear]]] = {}
    for path, module in modules.items():
        if isinstance(module, FusedPart):
            groups.setdefault(module.product.layer, {})[module.index] = path, module
        elif isinstance(module.forward, MatrixProduct):
            yield _Matrix(module.forward.layer, {path: module})
    for layer, parts in groups.items():
        whole = dict(parts[index] for index in sorted(parts))
        # A router that shares its input with other matrices is a part of their product, which then stays floats.
        if sum(module.out_features for module in whole.values()) == layer.out_features:
            yield _Matrix(layer, whole)


def _stored(path: str, module: nn.Linear, checkpoint: Checkpoint | None) -> StoredMatrix:
    name, weight = f"{path}.weight", module.weight.data
    if checkpoint is not None and name in checkpoint.tensors and checkpoint.tensors[name].shape == weight.shape:
        kind = checkpoint.tensors[name].kind
        return StoredMatrix(kind, lambda: weight, partial(checkpoint.codes, name), partial(checkpoint.spec, name))
    return StoredMatrix(str(weight.dtype).removeprefix("torch."), lambda: weight)
