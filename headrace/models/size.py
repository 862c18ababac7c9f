"""What a model's parameters will take, told by the model itself: it is built on the meta device, where nothing is allocated."""

from __future__ import annotations

import dataclasses

from headrace.layers.linear import Linear
from headrace.models import registry
from headrace.quant.groups import GROUP
from headrace.spec import AnySpec, ForeignSpec, ModelSpec
from headrace.spec.kv import DTYPE_BYTES


def weight_bytes(model: AnySpec, dtype: str, quantization: str) -> int:
    """What the weights will take, before they are loaded: to the byte for a native model that is not packed. For one that is,
    the most: its matrices packed, and a second copy of each as it was.
    """
    if isinstance(model, ForeignSpec):
        return model.num_weights * DTYPE_BYTES[dtype]
    size = _size(model, dtype)
    if quantization == "none":
        return size.nbytes
    # The head is always of 8 bits, and its copy a second one of embeddings that are tied to it.
    head, scales = model.vocab_size * model.hidden_size, 4 / GROUP
    body = (size.packable - head) * ({"int8": 1.0, "int4": 0.5}[quantization] + scales)
    copied = head * DTYPE_BYTES[dtype] if model.tie_word_embeddings else 0
    return size.nbytes + int(body + head * (1 + scales)) + copied


@dataclasses.dataclass(frozen=True)
class _Size:
    nbytes: int
    """Of all parameters, those that are tied once."""
    packable: int
    """Numbers in the matrices that ``quantization`` packs."""


def _size(spec: ModelSpec, dtype: str) -> _Size:
    """Of a native model in ``dtype``; parameters that a family keeps in another one count as they are.

    Raises:
        ConfigError: no family is of the spec's architecture.
    """
    model = registry.build(spec, dtype, "meta")
    packable = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    return _Size(sum(parameter.nbytes for parameter in model.parameters()), packable)
