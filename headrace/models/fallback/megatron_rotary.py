"""Rotary angles of Megatron-core models, for the positions of a step.

Megatron turns queries and keys by the angles of places 0, 1, 2 ... in its batch. A step's tokens are packed and stand
anywhere in their sequences, so the angles are made here, from the frequencies of the model's own rotary modules. (Those
modules also ask for a CUDA device, which a model on the CPU has not.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from headrace.models.fallback.refusal import Refusal


class Rotary:
    """What one of Megatron's rotary modules does to a position.

    Args:
        module: a ``RotaryEmbedding`` or ``YarnRotaryEmbedding``.
        path: of the module, for errors.

    Raises:
        Refusal: it is of another kind.
    """

    def __init__(self, module: Any, path: str, device: torch.device) -> None:
        kind = type(module).__name__
        if kind not in ("RotaryEmbedding", "YarnRotaryEmbedding"):
            raise Refusal(f"positions of a {kind} are not one number a token", path)
        self.yarn = kind == "YarnRotaryEmbedding"
        self.interleaved = bool(module.rotary_interleaved)
        if self.yarn and self.interleaved:
            raise Refusal("YaRN with interleaved channels is not defined in Megatron", path)
        frequencies = _yarn_frequencies(module) if self.yarn else module.inv_freq
        stretch = getattr(module, "seq_len_interpolation_factor", None)
        if stretch is not None and not self.yarn:
            frequencies = frequencies / stretch
        self.frequencies = frequencies.to(device, torch.float32)
        """``[rotated channels / 2]``"""
        self.magnitude = _yarn_magnitude(module) if self.yarn else 1.0
        """Factor on the rotated channels, which Megatron's attention applies."""
        self.key = (self.yarn, self.interleaved, self.magnitude, *([] if frequencies.is_meta else frequencies.tolist()))
        """Equal for modules that turn alike."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """``[T] -> [T, 1, 1, rotated channels]`` float32, as Megatron's attention takes them."""
        half = positions.float()[:, None] * self.frequencies
        whole = half.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((half, half), dim=-1)
        return whole[:, None, None, :]


class StepRotary(nn.Module):
    """In place of a rotary module that a layer asks by itself (multi-head latent attention): the angles of the step.

    Args:
        rotary: of the module that it stands in for.
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        self.angles: torch.Tensor | None = None
        """Of the step under way: ``[T, 1, 1, rotated channels]``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever places are asked for: the step's."""
        angles = self._angles()
        return (angles, self.rotary.magnitude) if self.rotary.yarn else angles

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return len(self._angles())

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype = torch.float32, packed_seq: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For Megatron's fused kernel."""
        angles, magnitude = self._angles(), self.rotary.magnitude
        return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)

    def _angles(self) -> torch.Tensor:
        if self.angles is None:
            raise ValueError("rotary angles were asked for outside a step")
        return self.angles


def _yarn_frequencies(module: Any) -> torch.Tensor:
    """YaRN (Peng et al., 2023), section 3.2: fast channels turn as they were trained to, slow ones are interpolated."""
    dim, base, context = module.dim, module.rotary_base, module.original_max_position_embeddings

    def channel(turns: float) -> float:
        """The pair of channels that turns so many times within the context of the training."""
        return float(dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)))

    low, high = channel(module.beta_fast), channel(module.beta_slow)
    if module.correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A range of no width is a step.
    width = high - low if high != low else 1e-3
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    interpolated = ((pairs - low) / width).clamp(0, 1)
    trained = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    mixed: torch.Tensor = trained * (1 - interpolated) + trained / module.scaling_factor * interpolated
    return mixed


def _yarn_magnitude(module: Any) -> float:
    def of(weight: float) -> float:
        return 1.0 if module.scaling_factor <= 1 else 0.1 * weight * math.log(module.scaling_factor) + 1.0

    if module.mscale is None or module.mscale_all_dim is None:
        return of(1.0)
    return of(module.mscale) / of(module.mscale_all_dim)
