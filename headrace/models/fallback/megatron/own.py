"""A Megatron-core model's own forward pass over one whole sequence: what headrace's attention is compared with.

Megatron's core attention and rotary embedding ask for the current CUDA device. Where that is not the model's, its modules run
with eager attention in their place, written down as the formula is, and with angles of Megatron's own frequencies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.model_spec import AttentionSpec
from headrace.models.capture import failing_module, one_line
from headrace.models.fallback.contract import dense_attention, finished_logits
from headrace.models.fallback.hooks import hooked
from headrace.models.fallback.megatron.describe import MegatronDescription, asked_device
from headrace.models.fallback.megatron.model import Sinks, evaluating, replaced
from headrace.models.fallback.megatron.rotary import Rotary


class OwnForward:
    """Logits of whole sequences.

    Args:
        described: the model, which is in eval mode, and otherwise as it was, when a pass is over.
        in_float32: modules compute in float32, whatever the model's dtype: each with a copy of its weights that lives as long
            as its call. Attention is eager then, since Megatron's own computes in what the model's config says.

    Raises:
        ConfigError: the model cannot run outside of an engine on this device.
    """

    def __init__(self, described: MegatronDescription, *, in_float32: bool = False) -> None:
        self._described = described
        self._in_float32 = in_float32
        here = asked_device() == described.device
        self.eager = in_float32 or not here
        """Attention is not Megatron's own."""
        mla = [layer.spec.layer for layer in described.layers if layer.rotary is not None]
        if mla and not here:
            raise ConfigError(
                f"layer {mla[0]} has multi-head latent attention, whose rotary embedding asks for a CUDA device, and the "
                f"model is on {described.device}: Megatron's own forward cannot run there",
                "model_impl",
            )

    @property
    def layers(self) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = self._described.model.decoder.layers
        return layers

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[T] -> [T, columns]`` float32, -inf in columns that pad the vocabulary.

        No tensor of inference mode is made: Megatron keeps some, and trains with them.

        Raises:
            ConfigError: a module fails; names it.
        """
        model, device = self._described.model, self._described.device
        ids = torch.tensor([tokens], device=device)
        places = torch.arange(len(tokens), device=device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(evaluating(model.modules()))
            if self._in_float32:
                stack.enter_context(_computing_in_float32(model))
            if self.eager:
                attentions = [(layer.attention, layer.spec) for layer in self._described.layers]
                stack.enter_context(
                    replaced([(one, "core_attention", EagerAttention(spec, one.core_attention)) for one, spec in attentions])
                )
            stack.enter_context(_as_config_error(model))
            logits = self._eagerly(ids, places) if self.eager else _by_itself(model, ids, places)
        return finished_logits(logits, self._described.spec.num_tokens)

    def _eagerly(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        model, rotary = self._described.model, self._described.rotary
        hidden = model.embedding(input_ids=ids, position_ids=places[None])
        angles = None if rotary is None else _angles(model.rotary_pos_emb, rotary, places)
        hidden = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
        shared = None
        if model.share_embeddings_and_output_weights:
            shared = model.shared_embedding_or_output_weight().to(hidden.dtype)
        logits: torch.Tensor = model.output_layer(hidden, weight=shared, runtime_gather_output=True)[0]
        return logits[:, 0]


class EagerAttention(nn.Module):
    """Causal attention over one whole sequence, in float32.

    Args:
        original: the module that this stands in for; only its sinks are read.
    """

    def __init__(self, spec: AttentionSpec, original: nn.Module) -> None:
        super().__init__()
        self._spec = spec
        self._sinks = Sinks(spec, original)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``[T, 1, heads, d]`` each -> ``[T, 1, heads * dv]``."""
        sinks = self._sinks(query.device)
        out = dense_attention(query[:, 0], key[:, 0], value[:, 0], self._spec, sinks, self._spec.window)
        return out.flatten(1)[:, None].to(query.dtype)


def _by_itself(model: Any, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    unseen = (places[None] > places[:, None])[None, None]
    logits: torch.Tensor = model(ids, places[None], unseen, runtime_gather_output=True)
    return logits[0]


def _angles(module: Any, rotary: Rotary, places: torch.Tensor) -> torch.Tensor:
    """``[T, 1, 1, rotated channels]``, of Megatron's own frequencies where they can be had without a CUDA device."""
    if rotary.yarn:
        return rotary.angles(places)
    half: torch.Tensor = module.get_freqs_non_repeated(len(places)).to(places.device)
    whole = half.repeat_interleave(2, dim=-1) if module.rotary_interleaved else torch.cat((half, half), dim=-1)
    return whole[:, None, None, :]


@contextlib.contextmanager
def _computing_in_float32(model: nn.Module) -> Iterator[None]:
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []

    def widen(module: nn.Module, args: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != torch.float32:
                originals.append((module, name, parameter))
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)

    def put_back(module: nn.Module, args: Any, out: Any) -> None:
        while originals and originals[-1][0] is module:
            owner, name, parameter = originals.pop()
            owner._parameters[name] = parameter

    owners = [module for module in model.modules() if module._parameters]
    handles = [module.register_forward_pre_hook(widen) for module in owners]
    handles += [module.register_forward_hook(put_back) for module in owners]
    try:
        with hooked(handles):
            yield
    finally:
        for owner, name, parameter in originals:
            owner._parameters[name] = parameter


@contextlib.contextmanager
def _as_config_error(model: nn.Module) -> Iterator[None]:
    """Raises ConfigError, with the name of the innermost running module, in place of what a module raises."""
    try:
        yield
    except Exception as error:
        # Modules of any kind: whatever one raises says why it cannot run.
        where = failing_module(error, model) or type(model).__name__
        raise ConfigError(f"Megatron's own forward cannot run: {where}: {one_line(error)}", "model_impl") from error
