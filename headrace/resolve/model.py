"""Number formats of the model: rotary factors, dtype, quantization, dtype of the KV cache."""

from __future__ import annotations

import dataclasses
from collections import Counter

from headrace.cache.fp8 import check_alignment
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.kernels import support
from headrace.model_spec import AnySpec, ForeignSpec, ModelSpec, MoeSpec, RopeSpec
from headrace.model_spec.kv import FP8_KV
from headrace.outputs import ExpertLayers
from headrace.quant import registry
from headrace.quant.candidates import EngineFacts
from headrace.quant.formats.find import find_scheme
from headrace.quant.formats.gguf import PLAIN_TYPES
from headrace.quant.formats.scheme import Scheme
from headrace.resolve.facts import DecisionLog, DeviceFacts, matrices
from headrace.sources.files import ModelFiles


def with_rope_factors(args: EngineArgs, model: AnySpec, log: DecisionLog) -> AnySpec:
    """The model with longrope's factors for the longest context there may be: one choice for all sequences."""
    ropes = [layer.rope for layer in model.layers if layer.rope is not None and layer.rope.kind == "longrope"]
    if not ropes:
        return model
    border = min(int(rope.parameters["original_max_position_embeddings"]) for rope in ropes)
    if not isinstance(args.max_model_len, int) or args.max_model_len <= border:
        why = f"longrope has other factors beyond {border} tokens: set max_model_len above it for those, in every sequence"
        log.note("rotary embedding", "longrope, short factors", why)
        return model
    why = f"max_model_len is beyond {border}, up to which longrope has other factors: every sequence gets the long ones"
    log.note("rotary embedding", "longrope, long factors", why)
    long: dict[RopeSpec | None, RopeSpec] = {rope: dataclasses.replace(rope, long_factors=True) for rope in ropes}
    layers = tuple(dataclasses.replace(each, rope=long.get(each.rope, each.rope)) for each in model.layers)
    longest = min(int(rope.parameters["max_position_embeddings"]) for rope in ropes)
    return dataclasses.replace(model, layers=layers, max_position=longest)


def stored_format(files: ModelFiles) -> Scheme | None:
    """Returns the number formats of a checkpoint that another library quantised; None: it has floats."""
    return find_scheme(files.config) if files.kind == "safetensors" else None


def note_stored_format(scheme: Scheme | None, dtype: str, quantization: str, device: DeviceFacts, log: DecisionLog) -> None:
    if scheme is None:
        return
    how = f"dequantised to {dtype}" if quantization == "none" else registry.find(quantization, device.device).stored
    log.note("checkpoint format", scheme, f"its matrices are {how}")


def gguf_types(files: ModelFiles) -> Counter[str] | None:
    """Counts the layers' matrices in the file by type, but for routers; None: it is no GGUF file, or is not read."""
    if files.kind != "gguf":
        return None
    from headrace.sources.gguf import open_gguf

    counts: Counter[str] = Counter()
    for path in files.weight_files:
        tensors = open_gguf(path).tensors
        counts.update(
            tensor.tensor_type.name
            for tensor in tensors
            if tensor.name.startswith("blk.") and len(tensor.shape) in (2, 3) and "ffn_gate_inp" not in tensor.name
        )
    return counts


def compute_dtype(
    args: EngineArgs, asked: str, model: AnySpec, types: Counter[str] | None, device: DeviceFacts, log: DecisionLog
) -> str:
    if args.dtype != "auto":
        return args.dtype
    quantised = types is not None and not types.keys() <= PLAIN_TYPES
    fastest = None if asked in ("auto", "none") else registry.find(asked, device.device).dtype
    if fastest is not None:
        log.note("dtype", fastest, f"the packed {asked} kernels are fastest in {fastest}")
        return fastest
    source = "quantised" if quantised else model.dtype
    if device.cuda:
        dtype = source if source in ("bfloat16", "float16") else "bfloat16"
        log.note("dtype", dtype, f"the checkpoint is {source}, and a GPU's matrix units compute in 16 bits")
        return dtype
    if not device.native_bfloat16:
        log.note("dtype", "float32", "this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16)")
        return "float32"
    if source not in ("quantised", "bfloat16"):
        log.note("dtype", "float32", f"the checkpoint is {source}, which bfloat16 would round")
        return "float32"
    log.note("dtype", "bfloat16", f"the checkpoint is {source}, and this CPU has bfloat16 instructions")
    return "bfloat16"


def engine_facts(args: EngineArgs, model: AnySpec, dtype: str, device: DeviceFacts) -> EngineFacts:
    """Collects what number formats of weights depend on."""
    return EngineFacts(
        device=device.device,
        native_kernels=device.native_kernels,
        dtype=dtype,
        asked_dtype=args.dtype != "auto",
        deterministic=args.deterministic,
        model=model,
        matrices=tuple(matrices(model)) if isinstance(model, ModelSpec) else model.matrices,
    )


def quantization(
    args: EngineArgs,
    requested: str,
    model: AnySpec,
    types: Counter[str] | None,
    stored: Scheme | None,
    dtype: str,
    device: DeviceFacts,
    log: DecisionLog,
) -> str:
    """Decides the format of packed weights, none if they are floats.

    Args:
        requested: as ``registry.meaning`` returns it.
        stored: the checkpoint's, if it has one.
    """
    if requested == "none":
        return requested
    if isinstance(model, ForeignSpec) and (not model.matrices or (requested == "auto" and stored is None)):
        if requested != "auto":
            why = "another library multiplies by this model's matrices"
            raise ConfigError(f"quantization {requested}: {why}: leave it at auto or none", "quantization")
        log.note("quantization", "none", "another library built the model: its weights stay as they are")
        return "none"
    engine = engine_facts(args, model, dtype, device)
    if requested != "auto":
        if limit := registry.refusal(requested, engine):
            raise ConfigError(f"quantization {requested}: {limit.reason}", limit.param)
        return requested
    name, why = registry.automatic(engine, types, stored)
    log.note("quantization", registry.title(name), why)
    return name


def check_head(args: EngineArgs, model: AnySpec, dtype: str, packed: str, device: DeviceFacts, log: DecisionLog) -> None:
    """Checks ``quantize_head`` and ``head_dtype``, and notes where options of quantised matrices have no effect.

    Args:
        packed: the quantization.

    Raises:
        ConfigError: the head cannot be held so.
    """
    asked = args.quantize_head
    if asked not in ("auto", "none"):
        if isinstance(model, ForeignSpec):
            raise ConfigError(f"quantize_head {asked} is for native models: leave it at auto or none", "quantize_head")
        if why := registry.head_refusal(asked, engine_facts(args, model, dtype, device), model):
            raise ConfigError(f"quantize_head {asked}: {why}", "quantize_head")
        log.note("quantize_head", asked, "asked for")
    if args.head_dtype == "float32" and isinstance(model, ForeignSpec) and dtype != "float32":
        message = f"head_dtype float32 is for native models: here another library multiplies by the head, in {dtype}"
        raise ConfigError(message, "head_dtype")
    if args.quantization_ignore and packed == registry.head_quantization(asked, packed, device.device) == "none":
        log.note("quantization_ignore", "no effect", "nothing is quantised")


def recorded_experts(args: EngineArgs, model: AnySpec, sparse: bool) -> ExpertLayers | None:
    """Returns the layers whose routers' choices are recorded. ``sparse``: prompts may attend sparsely.

    Raises:
        ConfigError: they cannot be recorded.
    """
    name = "enable_return_routed_experts"
    if not args.enable_return_routed_experts:
        if args.enable_return_routed_weights:
            raise ConfigError("enable_return_routed_weights needs enable_return_routed_experts", "enable_return_routed_weights")
        return None
    if not isinstance(model, ModelSpec):
        raise ConfigError(f"{name} is for native models: another library chooses the experts of this one", name)
    if sparse:
        raise ConfigError(f"{name} is for dense attention: set sparse_prefill off", name)
    mixtures = {index: mlp for index, mlp in enumerate(model.mlps) if isinstance(mlp, MoeSpec)}
    if not mixtures:
        raise ConfigError(f"{name} is for mixtures of experts, and this model has none", name)
    if any(mixture.vision is not None for mixture in mixtures.values()):
        raise ConfigError(f"{name}: this model has experts of its own for pictures, which is not supported", name)
    top_k, most = (max(getattr(mixture, field) for mixture in mixtures.values()) for field in ("top_k", "num_experts"))
    return ExpertLayers([*mixtures], len(model.mlps), top_k, most > 256, args.enable_return_routed_weights)


def kv_dtype(args: EngineArgs, model: AnySpec, stored: Scheme | None, dtype: str, device: DeviceFacts, log: DecisionLog) -> str:
    """Returns the dtype of the KV cache.

    Raises:
        ConfigError: the device or a layer cannot do with the one that was asked for.
    """
    if args.kv_cache_dtype == "auto":
        if stored is not None and stored.rounds_kv and device.cuda:
            log.note("kv_cache_dtype", dtype, "the checkpoint means FP8, for half the memory: ask for it with fp8_e4m3")
        return dtype
    if reasons := support.fp8_refusals(device.device):
        raise ConfigError("; ".join(reasons), "kv_cache_dtype")
    for spec in model.layers:
        check_alignment(spec, args.block_size)
    return FP8_KV
