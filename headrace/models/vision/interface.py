"""Models that read pictures: the facts of their vision parts, and the names of their checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from headrace.core.media import ItemInputs, TensorData
from headrace.model_spec import VisionSpec
from headrace.models.hf_config import HFConfig
from headrace.weights.names import NameTable

_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_AROUND_TEXT = {
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
}
"""Model types of models around the text part of others -> their architectures."""
VISION_NAME = re.compile(
    r"(?:model\.)?(?:visual|vision_tower|multi_modal_projector|vision_model|connector|resampler_model)\..*"
)
"""Checkpoint names of the vision part."""
_AUDIO_NAME = re.compile(r"(?:model\.)?(?:audio_tower|multi_modal_projector)\..*")
_PREFIXES = (
    {"model.": "model.language_model."},
    {"model.": "model.text_model."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)
"""Prefixes of the text part's names in checkpoints."""


def vision_spec(config: HFConfig) -> VisionSpec | None:
    """The part of a model that reads media; None: it reads text alone, or its media are not supported."""
    kind, vision = config.model_type, getattr(config, "vision_config", None)
    if kind == "qwen2_audio" and is_around_text(config):
        return VisionSpec(model_type=kind, features_only=True)
    if vision is None:
        return None
    if kind in _QWEN:
        levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        return VisionSpec(model_type=kind, deepstack_layers=levels)
    if kind == "gemma3":
        return VisionSpec(model_type=kind, bidirectional=True)
    if kind == "ernie4_5_vl_moe":
        return VisionSpec(model_type=kind, own_experts=True)
    if is_around_text(config):
        return VisionSpec(model_type=kind)
    return None


def is_around_text(config: HFConfig) -> bool:
    """Whether the text part of a model is a separate model, whose inputs get features of media."""
    architecture = _AROUND_TEXT.get(config.model_type)
    return architecture is not None and architecture in (getattr(config, "architectures", None) or [architecture])


def with_media_names(table: NameTable, spec: VisionSpec) -> NameTable:
    """Extends the table of a text model to checkpoints that hold it beside a part that reads media."""
    table.ignore(_AUDIO_NAME if spec.features_only else VISION_NAME)
    for prefixes in _PREFIXES:
        table.elsewhere(prefixes)
    return table


CALL_ROWS = 8192
"""Feature rows that an encoder computes at once, unless a single item has more: it bounds what it takes of memory."""


class EncodedItem(NamedTuple):
    """Features of one item, in the model's dtype."""

    features: torch.Tensor
    """``[n, hidden]``"""
    deepstack: torch.Tensor | None = None
    """``[levels, n, hidden]``, added to the outputs of the first layers."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.features] if self.deepstack is None else [self.features, self.deepstack]


class VisionEncoder(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        ...

    def weights(self) -> Sequence[torch.Tensor]: ...

    def encode(self, items: Sequence[ItemInputs]) -> list[EncodedItem]:
        """Features of several items. Raises any exception for inputs that it cannot encode."""
        ...


def encoded_item(item: ItemInputs, dtype: torch.dtype, device: torch.device) -> EncodedItem:
    """The features of an item that was encoded elsewhere."""
    deep = item.tensors.get("deepstack")
    return EncodedItem(
        device_tensor(item.tensors["features"], device).to(dtype),
        None if deep is None else device_tensor(deep, device).to(dtype),
    )


def device_tensor(data: TensorData, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait."""
    dtype = getattr(torch, data.dtype)
    if not data.data:
        return torch.empty(data.shape, dtype=dtype, device=device)
    host = torch.empty(len(data.data), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.numpy()[:] = np.frombuffer(data.data, np.uint8)
    return host.view(dtype).view(data.shape).to(device, non_blocking=True)
