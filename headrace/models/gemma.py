"""What Gemma 3 and 4 share: scaled embeddings, and norms before and after attention and MLP."""

from __future__ import annotations

from itertools import pairwise

import torch

from headrace.attention.context import ForwardContext
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.spec import ModelSpec
from headrace.weights.names import NameTable

IMAGES_AND_SOUND = (r"(?:model\.)?(?:vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*",)
"""Checkpoint names of what is not text."""


def within_a_larger_model(table: NameTable) -> NameTable:
    """The table, for the text part of a checkpoint too that has images or sound: as transformers saves it, and as it did."""
    table.elsewhere({"model.": "model.language_model."})
    table.elsewhere({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."})
    return table


class GemmaLayer(DecoderLayer):
    """What attention and MLP give is normed once more before it joins the residual stream.

    Such a norm, the sum and the next norm are one step. So the layer returns what its MLP gives as it is, and the next one
    norms it: ``follow`` tells it how.
    """

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__(model, index, dtype, device)
        self.pre_feedforward_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self.post_feedforward_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self._before = (self.post_feedforward_layernorm,)
        """The norm of what comes in beside a residual: another layer's, so a tuple keeps it out of this one's modules."""

    def follow(self, before: GemmaLayer) -> None:
        """From now on ``forward`` takes what ``before`` returns."""
        self._before = (before.post_feedforward_layernorm,)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add_normed(x, self._before[0], residual)
        x = self.self_attn(x, cos_sin, ctx)
        x, residual = self.pre_feedforward_layernorm.add_normed(x, self.post_attention_layernorm, residual)
        return self.fed(x, residual), residual

    def stream(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.post_feedforward_layernorm(x)  # type: ignore[no-any-return]

    def fed(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """What the MLP gives for x, the normed stream."""
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
        return self.norm.add_normed(x, last.post_feedforward_layernorm, residual)[0]  # type: ignore[arg-type]


def rounded(factor: float, dtype: torch.dtype) -> float:
    """The factor as the model was trained with it: in the weights' dtype."""
    return float(torch.tensor(factor).to(dtype))
