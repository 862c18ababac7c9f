"""The bytes that a model's parameters take, from a model built on the meta device, where nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from headrace.config import EngineArgs, MemoryLine
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.model_spec import AnySpec, ForeignSpec
from headrace.model_spec.kv import DTYPE_BYTES
from headrace.models import registry
from headrace.models.adapters import add_tables
from headrace.quant.ignored import ignored
from headrace.quant.native import NativeMethod
from headrace.quant.registry import find, head_quantization
from headrace.weights.names import HEAD, layer_names


def adapter_lines(model: AnySpec, dtype: str, args: EngineArgs) -> list[MemoryLine]:
    """Returns what the tables of adapters take that an engine with these arguments has beside a native model's weights."""
    if not args.enable_lora or isinstance(model, ForeignSpec):
        return []
    built, modules = registry.build(model, dtype, "meta"), args.lora_target_modules
    places, rank, names = args.max_loras, args.max_lora_rank, registry.name_table(model)
    return [add_tables(built, names, modules, places, rank, getattr(torch, dtype), "meta").memory_line(args)]


def weight_bytes(
    model: AnySpec,
    dtype: str,
    quantization: str,
    device: str,
    quantize_head: str = "auto",
    ignore: Sequence[str] = (),
    *,
    copies: bool = True,
) -> int:
    """Returns the bytes of the weights: exact for an unquantised model, otherwise those of a model whose matrices are
    all packed. A head that is kept as stored counts as floats.

    Args:
        device: its type.
        quantize_head: as of ``EngineArgs``.
        ignore: ``quantization_ignore``.
        copies: ``DeviceFacts.keeps_copies``: matrices that the quantization packs have copies in ``dtype`` where it may keep
            them, and not only those that no compiled kernel holds.
    """
    if isinstance(model, ForeignSpec):
        if quantization == "none":
            return model.num_weights * DTYPE_BYTES[dtype]
        held, packed = find(quantization, device), sum(map(math.prod, model.matrices))
        floats = model.num_weights - (0 if copies and held.copies else packed)
        return floats * DTYPE_BYTES[dtype] + math.ceil(packed * held.nbytes)
    built = registry.build(model, dtype, "meta")
    nbytes = sum(parameter.nbytes for parameter in built.parameters())
    head = head_quantization(quantize_head, quantization, device)
    if quantization == head == "none":
        return nbytes
    linears = {path: module for path, module in built.named_modules() if isinstance(module, Linear)}
    mixtures = {path: module for path, module in built.named_modules() if isinstance(module, Experts)}
    left = ignored(ignore, layer_names(registry.name_table(model), (*linears, *mixtures))) if ignore else {}
    for path, layer in linears.items():
        is_head = path == HEAD
        name = head if is_head else quantization
        if name == "none" or path in left:
            continue
        held, count = find(name, device), layer.weight.numel()
        if is_head and not held.rounding:
            continue
        nbytes += math.ceil(count * (held.head_nbytes if is_head else held.nbytes))
        tied = is_head and model.tie_word_embeddings
        copied = held.copies and (copies or bool(NativeMethod.supports(layer.in_features, layer.out_features, device)))
        # Embeddings that are tied to the head stay, and a copy of it in floats is another.
        if copied and tied:
            nbytes += count * DTYPE_BYTES[dtype]
        elif not copied and not tied:
            nbytes -= count * DTYPE_BYTES[dtype]
    if quantization != "none" and (held := find(quantization, device)).packs_experts:
        for path, experts in mixtures.items():
            if path not in left:
                count = sum(map(math.prod, experts.shapes.values()))
                nbytes += math.ceil(count * held.nbytes) - count * DTYPE_BYTES[dtype]
    return nbytes
