"""The common decoder: embedding, layers, a norm and the output head. A layer is attention and a gated MLP around a residual
stream, with RMS norms before both.

Read upwards: ``Decoder.forward`` calls ``DecoderLayer.forward``, which calls ``DecoderAttention.forward``. A family overrides
what differs: a class attribute (``norm_class``, ``attention_class``, ``layer_class``) or a small method. Parameters have the
names of Hugging Face's checkpoints, except for fused ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from headrace.attention.context import ForwardContext, WantedTokens
from headrace.attention.layer import Attention
from headrace.attention.sparse_rows import SparseRows
from headrace.errors import ConfigError, EngineError
from headrace.kernels.activation import sigmoid_gated
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.embedding import Embedding
from headrace.layers.linear import FusedLinear, Linear, RowParallelLinear, UnquantizedMethod
from headrace.layers.mlp import build_mlp
from headrace.layers.moe import MoeMLP
from headrace.layers.norm import RMSNorm, UnitRMSNorm
from headrace.layers.rotary import RotaryTable
from headrace.model_spec import AttentionSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.model_spec.projection import input_matrices
from headrace.models.adapters import AdapterTargets
from headrace.models.interface import HiddenStates, LayersCall, ModelInputs
from headrace.parallel.group import ALONE, Group, gather_columns


class DecoderAttention(nn.Module):
    """Attention of one layer, with its projections. All widths come from the layer's AttentionSpec."""

    norm_class: type[RMSNorm] = RMSNorm
    """Class of the norms of q and k."""

    def __init__(self, model: ModelSpec, spec: AttentionSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        parts = {f"{matrix.name}_proj": matrix.size for matrix in input_matrices(spec)}
        self.qkv_proj = FusedLinear(model.hidden_size, parts, bias=model.attention_bias, dtype=dtype, device=device)
        self.o_proj = RowParallelLinear(spec.out_size, model.hidden_size, bias=model.output_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | UnitRMSNorm | None = None
        self.k_norm: RMSNorm | UnitRMSNorm | None = None
        if model.qk_norm:
            self.q_norm = self.norm_class(spec.head_dim, model.norm_eps, dtype=dtype, device=device)
            if spec.kv_source is None:
                self.k_norm = self.norm_class(spec.head_dim, model.norm_eps, dtype=dtype, device=device)
        self.v_norm: UnitRMSNorm | None = None
        self.v_factor = 1.0
        self.attention = Attention(spec, device)

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return (self.qkv_proj,)

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices whose outputs those of ``qkv_proj`` are, in order."""
        return tuple(matrix.name for matrix in input_matrices(self.spec))

    def forward(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``, the rank's part of the sum over tensor-parallel ranks.

        The call between the projections is fused. Unfused, with q, k and v split by heads::

            q, k, v = q_norm(q), k_norm(k), v_norm(v) * v_factor
            q, k = rotate(q, k, cos_sin, spec.rotary_dim)
            write(cache, k, v, slots)
            out = backend.run(q, cache, sinks)
        """
        qkv, gate = self.qkv_proj(x), None
        if ctx.step.sparse is not None:
            self.see_sparse(qkv, ctx.step.sparse)
        if self.spec.output_gate:
            qkv, gate = qkv.split((qkv.shape[1] - self.spec.out_size, self.spec.out_size), dim=1)
        norms = self.q_norm, self.k_norm, self.v_norm
        streamed = self.qkv_proj.streams(len(qkv))
        out = self.attention.forward_qkv(qkv, ctx, cos_sin, *norms, self.v_factor, streamed=streamed)
        if gate is not None:
            out = sigmoid_gated(out, ctx.wanted_of(gate))
        return self.o_proj(out)  # type: ignore[no-any-return]

    def see_sparse(self, qkv: torch.Tensor, sparse: SparseRows) -> None:
        """Sees the projections of a step with sparse rows. A layer that decides how its heads attend does so here."""
        return None


class DecoderLayer(nn.Module):
    attention_class: type[nn.Module] = DecoderAttention
    state_class: type[nn.Module] = nn.Identity
    """Class of the state mixer, of families that have one: ``state_class(model, spec: StateSpec, dtype, device)``."""
    state_name = "linear_attn"
    """Attribute of the state mixer, which names it in checkpoints."""
    norm_class: type[RMSNorm] = RMSNorm
    """Class of its norms, and of the final one."""
    group: Group = ALONE
    """The tensor-parallel ranks, of which each has a part of the layer."""

    def __init__(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        block = model.blocks[index]
        if block.attention is not None:
            self.self_attn = self.attention_class(model, model.layers[block.attention], dtype, device)
        if block.state is not None:
            setattr(self, self.state_name, self.state_class(model, model.states[block.state], dtype, device))
        self._mixer = self.state_name if block.attention is None else "self_attn"
        self.mlp = self.build_mlp(model, index, dtype, device)
        self.input_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)
        self.post_attention_layernorm = self.norm_class(model.hidden_size, model.norm_eps, dtype=dtype, device=device)

    def build_mlp(self, model: ModelSpec, index: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        """Builds the MLP, ``down(act(gate(x)) * up(x))`` or without the gate, or a mixture of such experts."""
        spec = model.mlps[index]
        if isinstance(spec, MoeSpec):
            return MoeMLP(model.hidden_size, spec, dtype=dtype, device=device)
        return build_mlp(model.hidden_size, spec, dtype, device)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream is ``x + residual``; the next norm fuses the sum, and the one over tensor-parallel ranks.

        Args:
            x: ``[T, hidden]``, the rank's part of the previous layer's addition to the stream.
            residual: ``[T, hidden]``, the stream before that; None: x is the whole stream, as in the first layer.

        Returns:
            The same two for the next layer; of the wanted tokens, if the context has any.
        """
        if residual is None:
            normed, residual = self.input_layernorm(x), x
        else:
            normed, residual = self.input_layernorm.add(x, residual)
        if ctx.wanted is None:
            x = self.mix(normed, cos_sin, ctx)
        else:
            x = self.mix_wanted(normed, cos_sin, ctx, ctx.wanted)
            residual = ctx.wanted.of_stream(residual, ctx.step.query_start)
        normed, residual = self.post_attention_layernorm.add(x, residual)
        return self.run_mlp(normed, ctx), residual

    @property
    def mixer(self) -> nn.Module:
        """The attention, or in its place the state mixer, which is called alike."""
        return getattr(self, self._mixer)  # type: ignore[no-any-return]

    @property
    def selects(self) -> bool:
        """Whether ``forward`` may get a context with wanted tokens."""
        return type(self).forward is DecoderLayer.forward

    def mix_wanted(
        self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext, wanted: WantedTokens
    ) -> torch.Tensor:
        """``mix`` of ``[T, hidden]`` for the wanted tokens, ``[N, hidden]``. Attention without an indexer has no other queries
        than theirs."""
        mixer = self.mixer
        if type(self).mix is not DecoderLayer.mix or not isinstance(mixer, DecoderAttention) or mixer.spec.indexer is not None:
            return self.mix(x, cos_sin, dataclasses.replace(ctx, wanted=None))[wanted.tokens]
        ctx.backends[mixer.spec.layer].plan(wanted.step)
        return self.mix(x, cos_sin, ctx)

    def norm_readers(self) -> Iterator[tuple[RMSNorm, nn.Module]]:
        """Gives norms with the only module that reads each of them."""
        yield self.input_layernorm, self.mixer
        yield self.post_attention_layernorm, self.mlp

    def mix(self, x: Activations, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``: what tokens take from each other."""
        return self.mixer(x, cos_sin, ctx)  # type: ignore[no-any-return]

    def run_mlp(self, x: Activations, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        return self.mlp(x)  # type: ignore[no-any-return]

    def stream(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after the layer, ``[T, hidden]``, from the two results of ``forward``."""
        return residual + self.group.all_reduce(x)


class Decoder(nn.Module):
    """A causal language model with uninitialised parameters. Tied embeddings and ``lm_head`` share one parameter."""

    layer_class: type[DecoderLayer] = DecoderLayer
    group: Group = ALONE
    """The tensor-parallel ranks, of which each has a model of its part."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        shard = spec.shard if spec.shard is not None and spec.shard.cut_embedding else None
        rows, start = (spec.vocab_size, None) if shard is None else (shard.vocab_rows, shard.vocab_start)
        self.embed_tokens = Embedding(rows, spec.hidden_size, start=start, dtype=dtype, device=device)
        self.layers = nn.ModuleList(self.layer_class(spec, index, dtype, device) for index in range(spec.num_layers))
        self.norm = self.layer_class.norm_class(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(
            spec.hidden_size, spec.head_rows, dtype=dtype, device="meta" if spec.tie_word_embeddings else device
        )
        self.lm_head.out_dtype = torch.float32
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.score: nn.Linear | None = None
        """The classification head, which every rank holds whole."""
        if spec.num_classes:
            self.score = nn.Linear(spec.hidden_size, spec.num_classes, bias=False, dtype=dtype, device=device)
            self.score.requires_grad_(False)
        self.adapter_targets: AdapterTargets | None = None
        """Layers with tables for adapters; None: there are no adapters."""
        self.fused: LayersCall | None = None
        """Runs all layers in one call with the same result, in the steps that it supports."""
        self.rotary = self.build_rotary(device)

    def place(self, device: str | torch.device) -> None:
        """Makes everything but parameters on a device, for a model that was built on the meta device."""
        self.rotary = self.build_rotary(device)
        for module in self.modules():
            if isinstance(module, UnitRMSNorm):
                module.ones = torch.ones_like(module.ones, device=device)

    def build_rotary(self, device: str | torch.device) -> RopeAngles:
        return RopeAngles(self.spec, device)

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, ctx: ForwardContext) -> torch.Tensor:
        """Computes the normed hidden states of one step, ``[T, hidden]``."""
        if self.fused is not None and not inputs.extras and not inputs.adapters and self.fused.takes(ctx):
            return self.last_norm(*self.fused(inputs.embedded(self.embed), self.rotary(inputs, ctx), ctx))
        states = HiddenStates(inputs.embedded(self.embed))
        self.run_layers(states, inputs, ctx, range(self.spec.num_layers))
        return self.last_norm(states.x, states.residual)

    def selects(self, inputs: ModelInputs, ctx: ForwardContext) -> bool:
        """Returns whether ``forward_wanted`` can compute the step."""
        step = ctx.step
        usual = step.sparse is None and step.visible_ends is None and ctx.kinds is None and self.fused is None
        return usual and not inputs.extras and cast(DecoderLayer, self.layers[-1]).selects

    @torch.inference_mode()
    def forward_wanted(self, inputs: ModelInputs, ctx: ForwardContext, wanted: WantedTokens) -> torch.Tensor:
        """``forward`` of the wanted tokens alone, ``[N, hidden]``: behind its keys and values, the last layer computes no
        others."""
        states, last = HiddenStates(inputs.embedded(self.embed)), self.spec.num_layers - 1
        self.run_layers(states, inputs, ctx, range(last))
        if self.adapter_targets is not None:
            self.adapter_targets.rows.want(wanted.tokens)
        self.run_layers(states, inputs, dataclasses.replace(ctx, wanted=wanted), range(last, last + 1))
        return self.last_norm(states.x, states.residual)

    def run_layers(self, states: HiddenStates, inputs: ModelInputs, ctx: ForwardContext, layers: range) -> None:
        """Runs some layers of one step: ``states`` are those before the first of them, and then those after the last."""
        angles, extras = self.rotary(inputs, ctx), inputs.extras or {}
        for index in layers:
            x, residual = self.layers[index](states.x, states.residual, angles[index], ctx)
            states.x, states.residual = x, residual + extras[index] if index in extras else residual

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeds ids ``[T]`` int64 to the first layer's input ``[T, hidden]``, a new tensor."""
        return self.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def last_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Applies the final norm to the last layer's results: ``[T, hidden]``."""
        # No matrix of rounded rows reads the final norm.
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]  # type: ignore[return-value]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, vocab]`` float32."""
        return self._capped(gather_columns(self.group, self.lm_head(hidden).float(), self.spec.vocab_size))

    @torch.inference_mode()
    def token_logits(self, hidden: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Computes these columns of ``logits``: ``[N, hidden] -> [N, len(token_ids)]`` float32. Other rows of the head are left
        out where this rank holds all of them in floats."""
        head, ids = self.lm_head, list(token_ids)
        if self.group.size > 1 or head.batch_invariant or not isinstance(head.method, UnquantizedMethod):
            return self.logits(hidden)[:, ids]
        bias = None if head.bias is None else head.bias[ids].float()
        return self._capped(nn.functional.linear(hidden.float(), head.weight[ids].float(), bias))

    @torch.inference_mode()
    def classes(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the logits of the classification head: ``[N, hidden] -> [N, num_classes]`` float32."""
        if self.score is None:
            raise EngineError("the model has no classification head")
        return nn.functional.linear(hidden.float(), self.score.weight.float())

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.spec.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class RopeAngles:
    """Computes the cosines and sines of a step's tokens, once for all layers with the same rotary embedding."""

    def __init__(self, spec: ModelSpec, device: str | torch.device) -> None:
        self._max_position = spec.max_position
        self._tables: list[RotaryTable] = []
        self._of_layer: list[int | None] = []
        known: dict[tuple[RopeSpec, int], int] = {}
        for block in spec.blocks:
            layer = None if block.attention is None else spec.layers[block.attention]
            if layer is None or not layer.rotary_dim:
                self._of_layer.append(None)
                continue
            if layer.rope is None:
                raise ConfigError(f"layer {layer.layer} rotates {layer.rotary_dim} channels and has no rope", "rope_parameters")
            key = (layer.rope, layer.rotary_dim)
            if key not in known:
                known[key] = len(self._tables)
                self._tables.append(RotaryTable(layer.rope, layer.rotary_dim, device))
            self._of_layer.append(known[key])

    def __call__(self, inputs: ModelInputs, ctx: ForwardContext) -> list[torch.Tensor | None]:
        """Per layer of the model ``[T, rotary_dim]`` float32, or None for one that does not rotate.

        Raises:
            ValueError: the rank of ``rope_positions`` is not supported.
        """
        positions, lengths = inputs.positions, ctx.step.seq_lens_host
        longest = int(lengths.max()) if len(lengths) else 0
        if inputs.rope_positions is not None:
            # Their maximum is known only on the device.
            positions, longest = inputs.rope_positions, self._max_position
            if positions.dim() != 1 and not all(table.sectioned for table in self._tables):
                raise ValueError(f"rope_positions have rank {positions.dim()}; this model's rope takes rank 1")
        for table in self._tables:
            table.reserve(longest)
        angles = [table(positions) for table in self._tables]
        return [None if index is None else angles[index] for index in self._of_layer]
