"""FlashInfer's kernels, one for each combination of widths: which support a layer, and how they are compiled."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.attention.compiled import dtype_refusals
from headrace.kernels import support
from headrace.model_spec import AttentionSpec
from headrace.sources.user_cache import cache_directory

WIDTHS = (64, 128, 256)
MLA_WIDTHS = (512, 64)
"""Latent channels of an MLA key, which are its values too, and rotated channels."""
MLA_TILE = 128
"""Queries times heads that two programs of the MLA kernel compute together, or half of them each."""
_HOPPER = 90


@dataclasses.dataclass(frozen=True)
class PagedKernel:
    """FlashInfer's prefill kernel for one geometry, which also runs decode rows."""

    variant: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    windowed: bool
    capped: bool

    def plan(
        self, wrapper: Any, spec: AttentionSpec, indices: Sequence[torch.Tensor], *block_size: int, **options: int
    ) -> None:
        """Plans one of FlashInfer's prefill wrappers for rows of a layer.

        Args:
            indices: the rows' query starts, then where their keys are, in the order of the wrapper's arguments.
            block_size: for a wrapper of paged keys.
        """
        wrapper.plan(
            *indices,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            *block_size,
            head_dim_vo=spec.v_head_dim,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.soft_cap,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            **options,
        )

    def build(self) -> None:
        _find_imported()
        from flashinfer.prefill import get_batch_prefill_module

        # The arguments with which FlashInfer's own plan() asks for its module.
        kinds = (self.dtype, self.dtype, self.dtype, torch.int32)
        get_batch_prefill_module(self.variant, *kinds, self.head_dim, self.v_head_dim, 0, self.windowed, self.capped, False)


@dataclasses.dataclass(frozen=True)
class MLAKernel:
    """FlashInfer's kernel of absorbed MLA."""

    variant: str
    dtype: torch.dtype

    def plan(self, wrapper: Any, spec: AttentionSpec, indices: Sequence[torch.Tensor], block_size: int) -> None:
        """Plans FlashInfer's MLA wrapper; ``indices``: query starts, page starts, pages and lengths of the rows."""
        heads, kinds = (spec.num_heads, *MLA_WIDTHS), (self.dtype, self.dtype)
        wrapper.plan(*indices, *heads, block_size, True, spec.scale, *kinds)

    def build(self) -> None:
        _find_imported()
        from flashinfer.mla import get_batch_mla_module

        # As FlashInfer's own plan() asks for its module; without its profiler.
        get_batch_mla_module(self.variant, self.dtype, self.dtype, self.dtype, torch.int32, *MLA_WIDTHS, False)


Kernel = PagedKernel | MLAKernel
"""FlashInfer compiles one for each combination of its fields. ``variant`` is fa2 or fa3."""


def imported_modules(architecture: str, version: str) -> Path:
    """The folder of compiled modules that were imported for a device, such as sm90, and a version of FlashInfer."""
    return cache_directory() / "flashinfer" / f"{version}-cuda{torch.version.cuda}-{architecture}"


def _find_imported() -> None:
    """Lets FlashInfer look for imported modules before it compiles any, unless a package of compiled ones is installed."""
    if not (cache_directory() / "flashinfer").is_dir():
        return
    from flashinfer import __version__
    from flashinfer.jit import env

    folder = imported_modules(f"sm{support.compute_capability('cuda')}", __version__)
    if folder.is_dir() and not env.has_flashinfer_jit_cache():
        env.FLASHINFER_AOT_DIR = folder


def for_prompts(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> PagedKernel:
    """fa3 on Hopper if keys and values are equally wide, which it requires of paged ones; else fa2."""
    hopper = support.compute_capability(device) == _HOPPER and spec.head_dim == spec.v_head_dim
    return _paged("fa3" if hopper else "fa2", spec, dtype)


def for_contiguous(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> PagedKernel | None:
    """fa3 for contiguous keys wider than values, in its supported widths; None: there is none."""
    hopper = support.compute_capability(device) == _HOPPER
    return _paged("fa3", spec, dtype) if hopper and (spec.head_dim, spec.v_head_dim) == (192, 128) else None


def reads_copies(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether long prompts of a layer are attended over dequantised copies of their KV."""
    return for_prompts(spec, torch.bfloat16, device).variant == "fa3" and spec.window is None


def for_few_queries(spec: AttentionSpec, dtype: torch.dtype) -> PagedKernel:
    """fa2, for decode rows and captured steps: with few queries a row, fa3 reads a quarter as fast (H200)."""
    return _paged("fa2", spec, dtype)


def _paged(variant: str, spec: AttentionSpec, dtype: torch.dtype) -> PagedKernel:
    return PagedKernel(
        variant, dtype, spec.head_dim, spec.v_head_dim, windowed=spec.window is not None, capped=spec.soft_cap is not None
    )


def for_mla(dtype: torch.dtype, device: torch.device) -> MLAKernel:
    return MLAKernel("fa3" if support.compute_capability(device) == _HOPPER else "fa2", dtype)


def refusals(device: str, dtype: str) -> list[str]:
    """Reasons why FlashInfer cannot be used."""
    reasons = []
    if importlib.util.find_spec("flashinfer") is None and not support.planned():
        reasons.append("FlashInfer is not installed: pip install 'headrace[cuda]'")
    if torch.device(device).type != "cuda":
        reasons.append(f"it runs on CUDA devices, not on {device}")
    return reasons + dtype_refusals(dtype)
