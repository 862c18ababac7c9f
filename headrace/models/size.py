"""The bytes that a model's parameters take, from a model built on the meta device, where nothing is allocated."""

from __future__ import annotations

from headrace.layers.linear import Linear
from headrace.model_spec import AnySpec, ForeignSpec
from headrace.model_spec.kv import DTYPE_BYTES
from headrace.models import registry
from headrace.quant.registry import find


def weight_bytes(model: AnySpec, dtype: str, quantization: str) -> int:
    """Returns the bytes of the weights: exact for an unquantised native model, otherwise those of a model whose every matrix is
    packed, with a copy of each in ``dtype`` where the quantization may keep one."""
    if isinstance(model, ForeignSpec):
        return model.num_weights * DTYPE_BYTES[dtype]
    built = registry.build(model, dtype, "meta")
    nbytes = sum(parameter.nbytes for parameter in built.parameters())
    if quantization == "none":
        return nbytes
    held = find(quantization)
    head = model.vocab_size * model.hidden_size
    body = sum(module.weight.numel() for module in built.modules() if isinstance(module, Linear)) - head
    packed = body * held.nbytes + (head * held.head_nbytes if held.packs_head else 0)
    head_in_floats = head if held.packs_head else 0
    if held.copies:
        # A packed head has a copy of its own where the floats are those of embeddings that are tied to it.
        nbytes += head_in_floats * DTYPE_BYTES[dtype] if model.tie_word_embeddings else 0
    else:
        nbytes -= (body + (0 if model.tie_word_embeddings else head_in_floats)) * DTYPE_BYTES[dtype]
    return nbytes + int(packed)
