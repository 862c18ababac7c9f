"""Models of Megatron's distributed checkpoints: built from the arguments of the training run, filled by Megatron-core.

What the checkpoint holds beside tensors is never unpickled: ``.metadata`` was read before by a reader that runs nothing
(``sources/megatron.py``), ``common.pt`` is read as plain data, and objects that Transformer Engine stores beside its weights
are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
import warnings
from typing import Any

import torch

from headrace.config import Decision, EngineArgs, EngineConfig
from headrace.errors import ConfigError, listed
from headrace.model_spec import ForeignSpec
from headrace.models.capture import one_line
from headrace.models.fallback.megatron.describe import MegatronDescription, check_routers, describe_megatron, import_megatron
from headrace.models.fallback.megatron.model import MegatronModel
from headrace.models.fallback.refusal import refusals_as_errors
from headrace.sources.files import ModelFiles
from headrace.sources.megatron import COMMON, MegatronFiles, check_arguments, find_megatron
from headrace.weights.load import Progress
from headrace.weights.report import LoadReport, unquantized_report

_SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "softmax_scale", "softmax_type"),
    *("fp32_residual_connection", "apply_residual_connection_post_layernorm", "add_bias_linear", "add_qkv_bias"),
    *("activation_func_clamp_value", "glu_linear_offset", "rotary_interleaved", "window_size", "window_attn_skip_freq"),
    *("normalization", "qk_layernorm", "qk_l2_norm", "attention_output_gate", "no_rope_freq", "apply_query_key_layer_scaling"),
    *("attention_softmax_in_fp32", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq"),
    *("moe_ffn_hidden_size", "moe_router_load_balancing_type", "moe_router_topk", "moe_router_topk_limited_devices"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_score_function", "moe_router_dtype", "moe_router_enable_expert_bias", "moe_apply_probs_on_input"),
    *("moe_latent_size", "experimental_attention_variant", "moe_expert_capacity_factor", "moe_router_force_load_balancing"),
)
"""Arguments that define the computation, which Megatron's config has under the same names. Training options are left out."""
_SAME_MLA = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base"),
    *("rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    "mscale_all_dim",
)
_NOT_RUN = ("linear_attention_freq", "heterogeneous_layers_config_path", "hybrid_override_pattern", "use_kitchen", "spec")
"""Arguments of models that are not stacks of attention and MLP layers."""
_PARTS = ("embedding.", "decoder.", "output_layer.")


@dataclasses.dataclass(frozen=True)
class StoredMegatron:
    """A model of a checkpoint, not loaded yet."""

    checkpoint: MegatronFiles
    arguments: argparse.Namespace
    spec: ForeignSpec
    decisions: tuple[Decision, ...]

    def load(self, files: ModelFiles, config: EngineConfig, progress: Progress) -> tuple[MegatronModel, LoadReport]:
        """Raises ConfigError if weights are missing, or there are some that the model has no place for."""
        start = time.perf_counter()
        total = sum(file.stat().st_size for file in self.checkpoint.files)
        progress(0, total)
        device = torch.device(config.device, torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
        with _quiet():
            model = _build(self.arguments, self.checkpoint, getattr(torch, config.dtype), device)
            _fill(model, self.checkpoint)
        progress(total, total)
        described = _described(model, self.arguments)
        report = unquantized_report(model, config.dtype, time.perf_counter() - start, total)
        return MegatronModel(described), report


def stored_megatron(args: EngineArgs, files: ModelFiles, why: str) -> StoredMegatron:
    """Describes the model of a checkpoint.

    Raises:
        ConfigError: the checkpoint does not say what its model is, asks for objects that are not plain data, or its model
            cannot run here.
        ImportError: there is no megatron-core.
    """
    checkpoint = find_megatron(files.directory)
    with _quiet():
        import_megatron()
        arguments = _read_arguments(checkpoint)
    for name in _NOT_RUN:
        if getattr(arguments, name, None):
            raise ConfigError(f"the checkpoint's {name} is {getattr(arguments, name)}: such models are not run", "model")
    if args.load_format != "auto":
        raise ConfigError(f"load_format {args.load_format} is not for Megatron's checkpoints: leave it at auto", "load_format")
    dtype = getattr(arguments, "params_dtype", None) or torch.float32
    with _quiet(), torch.device("meta"):
        model = _build(arguments, checkpoint, dtype, torch.device("cpu"))
    spec = _described(model, arguments).spec
    if args.device == "cpu" or not torch.cuda.is_available():
        with refusals_as_errors(type(model).__name__, "Megatron"):
            check_routers(model, torch.device("cpu"))
    return StoredMegatron(checkpoint, arguments, spec, (Decision("model_impl", "megatron", why),))


def _described(model: Any, arguments: argparse.Namespace) -> MegatronDescription:
    with refusals_as_errors(type(model).__name__, "Megatron"):
        return describe_megatron(model, num_tokens=getattr(arguments, "vocab_size", None))


def _read_arguments(checkpoint: MegatronFiles) -> argparse.Namespace:
    """Reads the arguments of the training run: plain data, and the enumerations of Megatron that arguments may hold."""
    from megatron.core.safe_globals import SAFE_GLOBALS

    file = checkpoint.directory / COMMON
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            common = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged file surfaces as errors of several libraries.
        raise ConfigError(f"{file} is not read: {' '.join(str(error).split())[:300]}", "model") from error
    arguments = common.get("args") if isinstance(common, dict) else None
    if not isinstance(arguments, argparse.Namespace):
        raise ConfigError(
            f"{file} has no arguments of a training run, which say what the model is: build the model, load the checkpoint "
            "with megatron-core, and hand it to LLM.from_megatron",
            "model",
        )
    check_arguments(vars(arguments), file)
    return arguments


def _build(arguments: argparse.Namespace, checkpoint: MegatronFiles, dtype: torch.dtype, device: torch.device) -> Any:
    """Builds the model with uninitialised weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    _start_alone(device)
    cuda = device.type == "cuda"
    engine = cuda and _has_transformer_engine()
    try:
        config = _config(arguments, dtype, cuda, engine)
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization=config.normalization)
        with torch.random.fork_rng(devices=[device] if cuda else []):
            model = GPTModel(
                config,
                layers,
                vocab_size=checkpoint.tensors["embedding.word_embeddings.weight"][0],
                max_sequence_length=arguments.max_position_embeddings,
                share_embeddings_and_output_weights=not getattr(arguments, "untie_embeddings_and_output_weights", False),
                position_embedding_type=getattr(arguments, "position_embedding_type", "learned_absolute"),
                rotary_percent=getattr(arguments, "rotary_percent", 1.0),
                rotary_base=getattr(arguments, "rotary_base", 10000),
                rope_scaling=getattr(arguments, "use_rope_scaling", False),
                rope_scaling_factor=getattr(arguments, "rope_scaling_factor", 8.0),
                seq_len_interpolation_factor=getattr(arguments, "rotary_seq_len_interpolation_factor", None),
            )
    except Exception as error:
        # Megatron checks with assertions, and asks for a GPU in the middle of things.
        raise ConfigError(
            f"Megatron cannot build the model of {checkpoint.directory} on {device}: {one_line(error)}", "model"
        ) from error
    model.train(False)
    model.requires_grad_(False)
    # Norms are made in float32 whatever the config says; what chooses experts stays so.
    model.to(device if cuda else None, dtype)
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    return model


def _config(arguments: argparse.Namespace, dtype: torch.dtype, cuda: bool, engine: bool) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    mla = bool(getattr(arguments, "multi_latent_attention", False))
    kind = MLATransformerConfig if mla else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    names = [name for name in (*_SAME, *(_SAME_MLA if mla else ())) if name in known and hasattr(arguments, name)]
    values: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    options = vars(arguments)
    values["layernorm_epsilon"] = options.get("norm_epsilon", 1e-5)
    values["layernorm_zero_centered_gamma"] = options.get("apply_layernorm_1p", False)
    values["num_moe_experts"] = options.get("num_experts")
    if options.get("group_query_attention"):
        values["num_query_groups"] = options["num_query_groups"]
    values |= _activation(options)
    return kind(
        **values,
        multi_latent_attention=mla,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=not cuda,
        perform_initialization=False,
        moe_grouped_gemm=engine and values["num_moe_experts"] is not None,
        masked_softmax_fusion=False,
    )


def _activation(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("swiglu"):
        return {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    if options.get("quick_geglu"):
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return {"activation_func": quick_gelu, "gated_linear_unit": True}
    if options.get("squared_relu"):
        from megatron.core.activations import squared_relu

        return {"activation_func": squared_relu}
    return {}


def _fill(model: Any, checkpoint: MegatronFiles) -> None:
    """Reads every tensor of the model from the checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from megatron.core.safe_globals import SAFE_GLOBALS
    from torch.distributed.checkpoint.api import CheckpointException

    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") not in ("", "0"):
        raise ConfigError("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: a checkpoint's objects would be unpickled", "model")
    entries = {name: entry for name, entry in model.sharded_state_dict().items() if not isinstance(entry, ShardedObject)}
    strange = [name for name, entry in entries.items() if not isinstance(entry, (ShardedTensor, ShardedTensorFactory))]
    if strange:
        raise ConfigError(f"{strange[0]} is kept in a way that is not read from checkpoints", "model")
    keys = {entry.key for entry in entries.values()}
    # Entries that are not tensors in the index would be unpickled.
    missing = sorted(keys - checkpoint.tensors.keys())
    if missing:
        raise ConfigError(f"{checkpoint.directory} lacks {listed(missing)}", "model")
    unused = sorted(name for name in checkpoint.tensors if name.startswith(_PARTS) and name not in keys)
    if unused:
        raise ConfigError(f"the model has no place for {listed(unused)} of {checkpoint.directory}", "model")
    try:
        # Megatron reads the arguments along with the tensors.
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            loaded = dist_checkpointing.load({"model": entries}, str(checkpoint.directory), validate_access_integrity=False)
    except (Exception, CheckpointException) as error:
        # PyTorch's own error is not an Exception, and has one cause for each rank; there is one rank.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ConfigError(f"{checkpoint.directory} cannot be loaded: {one_line(cause)}", "model") from error
    report = model.load_state_dict(loaded["model"], strict=False)
    left = [name for name in report.missing_keys if not name.endswith("_extra_state")]
    if left or report.unexpected_keys:
        raise ConfigError(f"weights do not fit the model: {listed(left or list(report.unexpected_keys))}", "model")


def _start_alone(device: torch.device) -> None:
    """Initialises process groups of this process alone, which Megatron's modules need, unless a trainer has done so."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    if not torch.distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    if torch.distributed.get_world_size() != 1:
        raise ConfigError(
            "a Megatron checkpoint is loaded in one process: build the model in your trainer's, and hand it over", "model"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    if device.type == "cuda":
        # Megatron's initialisers and dropout look for its own random states.
        model_parallel_cuda_manual_seed(0)


def _quiet() -> warnings.catch_warnings[None]:
    """Suppresses warnings of Megatron and PyTorch about optional packages and deprecations, which users cannot act on."""
    return warnings.catch_warnings(action="ignore")


def _has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True
