"""Common parts of Gemma 3 and 4: scaled embeddings, and norms before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.norm import RMSNorm
from headrace.model_spec import ModelSpec
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.weights.names import NameTable

NON_TEXT = (r"(?:model\.)?(?:vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*",)
"""Checkpoint names of the parts that are not text."""


def with_multimodal_names(table: NameTable) -> NameTable:
    """Extends the table to the text part of multimodal checkpoints, with transformers' present and former names."""
    table.elsewhere({"model.": "model.language_model."})
    table.elsewhere({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."})
    return table


class GemmaLayer(DecoderLayer):
    """A layer that norms the outputs of attention and MLP once more before the residual sum.

    That norm, the sum and the next norm are one kernel. So the layer returns its MLP's output, and the next layer
    norms it with the norm that ``follow`` passes to it.
    """

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        self.pre_feedforward_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self.post_feedforward_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self._before = (self.post_feedforward_layernorm,)
        """The previous layer's norm, for the input beside a residual. In a tuple it is not a submodule of this layer."""

    def follow(self, before: GemmaLayer) -> None:
        """Makes ``forward`` take the results of ``before``."""
        self._before = (before.post_feedforward_layernorm,)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if residual is None:
            normed, residual = self.input_layernorm(x), x
        else:
            normed, residual = self.input_layernorm.add_normed(x, self._before[0], residual)
        x = self.self_attn(normed, cos_sin, ctx)
        normed, residual = self.pre_feedforward_layernorm.add_normed(x, self.post_attention_layernorm, residual)
        return self.feed_forward(normed, residual), residual

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        yield self.input_layernorm, self.self_attn
        yield self.pre_feedforward_layernorm, self.mlp

    def stream(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.post_feedforward_layernorm(self.group.all_reduce(x))  # type: ignore[no-any-return]

    def feed_forward(self, x: Activations, stream: torch.Tensor) -> torch.Tensor:
        """Returns the rank's part of the MLP's output for x, the normed stream."""
        return self.mlp(x)  # type: ignore[no-any-return]


class GemmaDecoder(Decoder):
    layer_class = GemmaLayer

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.embed_scale = rounded(spec.hidden_size**0.5, dtype)
        layers = [layer for layer in self.layers if isinstance(layer, GemmaLayer)]
        for before, layer in pairwise(layers):
            layer.follow(before)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids) * self.embed_scale  # type: ignore[no-any-return]

    def last_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is None:
            return self.norm(x)  # type: ignore[no-any-return]
        last = self.layers[-1]
        return self.norm.add_normed(x, last.post_feedforward_layernorm, residual)[0]  # type: ignore[arg-type, return-value]


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Rounds the factor to the weights' dtype, as in training."""
    return float(torch.tensor(factor).to(dtype))
