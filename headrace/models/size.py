"""The bytes that a model's parameters take, from a model built on the meta device, where nothing is allocated."""

from __future__ import annotations

from headrace.layers.linear import Linear
from headrace.model_spec import AnySpec, ForeignSpec
from headrace.model_spec.kv import DTYPE_BYTES
from headrace.models import registry
from headrace.quant.convert import FP8
from headrace.quant.groups import GROUP


def weight_bytes(model: AnySpec, dtype: str, quantization: str) -> int:
    """Returns the bytes of the weights: exact for an unquantised native model. With int8 and int4 an upper bound: the packed
    matrices and a second copy of each in ``dtype``. FP8 has no copies; where a checkpoint stores it, all matrices but the head
    count as if they were in it.
    """
    if isinstance(model, ForeignSpec):
        return model.num_weights * DTYPE_BYTES[dtype]
    built = registry.build(model, dtype, "meta")
    nbytes = sum(parameter.nbytes for parameter in built.parameters())
    if quantization == "none":
        return nbytes
    packable = sum(module.weight.numel() for module in built.modules() if isinstance(module, Linear))
    # The head always has 8 bits, and its copy is a second one of embeddings that are tied to it.
    head, scales = model.vocab_size * model.hidden_size, 4 / GROUP
    if quantization in FP8:
        return nbytes - int((packable - head) * (DTYPE_BYTES[dtype] - 1 - scales))
    body = (packable - head) * ({"int8": 1.0, "int4": 0.5}[quantization] + scales)
    copied = head * DTYPE_BYTES[dtype] if model.tie_word_embeddings else 0
    return nbytes + int(body + head * (1 + scales)) + copied
