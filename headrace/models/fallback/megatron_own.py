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
from headrace.models.fallback.contract import finished_logits
from headrace.models.fallback.megatron import evaluating
from headrace.models.fallback.megatron_describe import MegatronDescription, asked_device
from headrace.models.fallback.megatron_rotary import Rotary
from headrace.spec import AttentionSpec


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
        latent = [layer.spec.layer for layer in described.layers if layer.rotary is not None]
        if latent and not here:
            raise ConfigError(
                f"layer {latent[0]} has multi-head latent attention, whose rotary embedding asks for a CUDA device, and the "
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
                stack.enter_context(self._eager())
            stack.enter_context(_naming(model))
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

    @contextlib.contextmanager
    def _eager(self) -> Iterator[None]:
        """Eager attention in place of every layer's ``core_attention``."""
        originals = [(layer.attention, layer.attention.core_attention) for layer in self._described.layers]
        try:
            for layer, (attention, original) in zip(self._described.layers, originals, strict=True):
                attention.core_attention = EagerAttention(layer.spec, original)
            yield
        finally:
            for attention, original in originals:
                attention.core_attention = original


class EagerAttention(nn.Module):
    """Causal attention over one whole sequence, in float32.

    Args:
        original: the module that this stands in for; only its sinks are read.
    """

    def __init__(self, spec: AttentionSpec, original: nn.Module) -> None:
        super().__init__()
        self._spec = spec
        # Not registered: it is the trainer's.
        self._original = (original,)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """``[T, 1, heads, d]`` each -> ``[T, 1, heads * dv]``."""
        spec = self._spec
        # [heads, T, d]
        q, k, v = (x[:, 0].transpose(0, 1).float() for x in (query, key, value))
        k, v = (x.repeat_interleave(spec.group_size, dim=0) for x in (k, v))
        products = spec.scale * q @ k.transpose(1, 2)
        places = torch.arange(q.shape[1], device=q.device)
        unseen = places[None] > places[:, None]
        if spec.window is not None:
            unseen |= places[None] <= places[:, None] - spec.window
        products = products.masked_fill(unseen, -torch.inf)
        if spec.sinks:
            # A sink is a key whose value is nothing. Without a weight its product is 0.
            learned: torch.Tensor | None = getattr(self._original[0], "softmax_offset", None)
            sinks = torch.zeros(spec.num_heads, device=q.device) if learned is None else learned.flatten().float()
            products = torch.cat((products, sinks[:, None, None].expand(-1, q.shape[1], 1)), dim=-1)
        mixed = products.softmax(-1)[..., : q.shape[1]] @ v
        return mixed.transpose(0, 1).flatten(1)[:, None].to(query.dtype)


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
    held: list[tuple[nn.Module, str, nn.Parameter]] = []

    def widen(module: nn.Module, args: Any) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != torch.float32:
                held.append((module, name, parameter))
                module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)

    def put_back(module: nn.Module, args: Any, out: Any) -> None:
        while held and held[-1][0] is module:
            owner, name, parameter = held.pop()
            owner._parameters[name] = parameter

    owners = [module for module in model.modules() if module._parameters]
    handles = [module.register_forward_pre_hook(widen) for module in owners]
    handles += [module.register_forward_hook(put_back) for module in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for owner, name, parameter in held:
            owner._parameters[name] = parameter


@contextlib.contextmanager
def _naming(model: nn.Module) -> Iterator[None]:
    """Raises ConfigError, with the name of the innermost module under way, in place of what a module raises."""
    under_way: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def begin(module: nn.Module, args: Any) -> None:
        under_way.append(names[module])

    def end(module: nn.Module, args: Any, out: Any) -> None:
        under_way.pop()

    handles = [module.register_forward_pre_hook(begin) for module in names]
    handles += [module.register_forward_hook(end) for module in names]
    try:
        yield
    except Exception as error:
        # Modules of any kind: whatever one raises says why it cannot run.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        where = next(filter(None, reversed(under_way)), type(model).__name__)
        raise ConfigError(f"Megatron's own forward cannot run: {where}: {reason}", "model_impl") from error
    finally:
        for handle in handles:
            handle.remove()
