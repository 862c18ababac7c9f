"""Small Megatron-core models in one process, and what they say by themselves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

VOCAB = 96
CONTEXT = 128


def start() -> None:
    """Megatron's process groups: this process alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    cuda = torch.cuda.is_available()
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        if cuda:
            model_parallel_cuda_manual_seed(0)


def without_transformer_engine() -> list[Any]:
    """Patches of places that take it for granted: where Megatron's own wrappers of it can be imported without it."""
    import importlib.util

    if importlib.util.find_spec("transformer_engine") is not None:
        return []
    return [
        mock.patch("megatron.core.transformer.multi_latent_attention.HAVE_TE", False),
        mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True),
    ]


@contextlib.contextmanager
def no_device_asked_for() -> Iterator[None]:
    """Megatron asks for the current CUDA device and its random numbers in places that would do on any device."""

    class Tracker:
        def fork(self, name: str = "") -> contextlib.nullcontext[None]:
            return contextlib.nullcontext()

    tracker = "megatron.core.tensor_parallel.random.get_cuda_rng_tracker"
    patches = [
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        mock.patch(tracker, Tracker),
        mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", Tracker),
        mock.patch("megatron.core.tensor_parallel.layers.get_cuda_rng_tracker", Tracker),
        *without_transformer_engine(),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "masked_softmax_fusion": False,
        **changes,
    }


def gpt(
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spec: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    mla: bool = False,
    std: float = 0.3,
    **config: Any,
) -> Any:
    """A GPTModel with random weights, in eval mode.

    Args:
        std: of the matrices' values.
        spec: of ``get_gpt_layer_local_spec``.
        model: of ``GPTModel``.
        config: of ``TransformerConfig``.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    start()
    kind = MLATransformerConfig if mla else TransformerConfig
    config.setdefault("tensor_model_parallel_size", parallel_state.get_tensor_model_parallel_world_size())
    given = kind(**settings(params_dtype=dtype, multi_latent_attention=mla, **config))
    layers = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=mla, **(spec or {}))
    if mla:
        # Megatron's plain attention has values as wide as keys; without Transformer Engine there is no other.
        layers.submodules.self_attention.submodules.core_attention = Eager
    torch.manual_seed(seed)
    options: dict[str, Any] = {"position_embedding_type": "rope", **(model or {})}
    with contextlib.ExitStack() as stack:
        for patch in without_transformer_engine():
            stack.enter_context(patch)
        made = GPTModel(given, layers, VOCAB, CONTEXT, **options).to(device=device, dtype=dtype)
    rank = torch.distributed.get_rank()
    for index, parameter in enumerate(made.parameters()):
        # Tensor-parallel processes share vectors, and have their own parts of matrices.
        own = 1000 * rank if parameter.dim() > 1 else 0
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed * 10_000 + own + index))
        parameter.data.copy_(1 + 0.2 * noise if parameter.dim() == 1 else std * noise)
    made.train(False)
    return made


class Eager(nn.Module):
    """Causal attention over one sequence, by the formula."""

    def __init__(self, softmax_scale: float | None = None, window: int | None = None, **_: Any) -> None:
        super().__init__()
        self.scale, self.window = softmax_scale or 1.0, window

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **_: Any) -> torch.Tensor:
        q, k, v = (x[:, 0].transpose(0, 1).float() for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        logits = self.scale * q @ k.transpose(1, 2)
        places = torch.arange(q.shape[1], device=q.device)
        hidden = places[None] > places[:, None]
        if self.window is not None:
            hidden |= places[None] <= places[:, None] - self.window
        out = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return out.transpose(0, 1).flatten(1)[:, None].to(query.dtype)


def angles(count: int, channels: int, base: float = 10000.0, interleaved: bool = False) -> torch.Tensor:
    """``[count, 1, 1, channels]``, by the formula."""
    turns = base ** (-torch.arange(0, channels, 2).double() / channels)
    half = torch.arange(count).double()[:, None] * turns
    whole = torch.stack((half, half), -1).flatten(1) if interleaved else torch.cat((half, half), -1)
    return whole.float()[:, None, None]


@torch.no_grad()
def eager_logprobs(model: Any, tokens: Sequence[int], rotary: torch.Tensor | None, window: int | None = None) -> torch.Tensor:
    """``[T, VOCAB]`` of the same modules with eager attention, the whole sequence at once."""
    layers = [layer.self_attention for layer in model.decoder.layers if hasattr(layer.self_attention, "core_attention")]
    originals = [layer.core_attention for layer in layers]
    try:
        for layer in layers:
            layer.core_attention = Eager(layer.hidden_size_per_attention_head**-0.5, window)
        ids = torch.tensor([tokens])
        hidden = model.embedding(input_ids=ids, position_ids=torch.arange(len(tokens))[None])
        hidden = model.decoder(
            hidden_states=hidden, attention_mask=None, rotary_pos_emb=None if rotary is None else rotary[: len(tokens)]
        )
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=True)
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer.core_attention = original
    return logits[:, 0].float().log_softmax(-1)


@torch.no_grad()
def own_logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """``[T, VOCAB]`` of Megatron's own forward pass, the whole sequence at once."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    places = torch.arange(len(tokens), device=device)
    mask = (places[None] > places[:, None])[None, None]
    logits = model(ids, places[None], mask)
    return logits[0].float().log_softmax(-1)
