"""Number formats of the model: rotary factors, dtype, quantization, dtype of the KV cache."""

from __future__ import annotations

import dataclasses
from collections import Counter

from headrace.cache.fp8 import check_alignment
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.kernels import support
from headrace.model_spec import AnySpec, ForeignSpec, MoeSpec, RopeSpec
from headrace.model_spec.kv import FP8_KV
from headrace.quant.convert import FP8
from headrace.quant.formats.find import find_scheme
from headrace.quant.formats.gguf import INT4_TYPES, INT8_TYPES, PLAIN_TYPES
from headrace.quant.formats.scheme import Scheme
from headrace.quant.int4 import Int4Method
from headrace.quant.int8 import Int8Method
from headrace.quant.native import NativeMethod
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


def note_stored_format(scheme: Scheme | None, dtype: str, quantization: str, log: DecisionLog) -> None:
    if scheme is None:
        return
    how = {"none": f"dequantised to {dtype}", "stored": "multiplied as they are stored where a kernel can"}
    log.note("checkpoint format", scheme, f"its matrices are {how.get(quantization, f'packed as {quantization}')}")


def gguf_types(files: ModelFiles) -> Counter[str] | None:
    """Counts the layers' matrices in the file by type; None: it is no GGUF file, or is not read."""
    if files.kind != "gguf":
        return None
    from headrace.sources.gguf import open_gguf

    counts: Counter[str] = Counter()
    for path in files.weight_files:
        tensors = open_gguf(path).tensors
        counts.update(
            tensor.tensor_type.name for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) == 2
        )
    return counts


def compute_dtype(args: EngineArgs, model: AnySpec, types: Counter[str] | None, device: DeviceFacts, log: DecisionLog) -> str:
    if args.dtype != "auto":
        return args.dtype
    quantised = types is not None and not types.keys() <= PLAIN_TYPES
    if args.quantization in ("int8", "int4"):
        log.note("dtype", "bfloat16", f"the packed {args.quantization} kernels are fastest in bfloat16")
        return "bfloat16"
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


def quantization(
    args: EngineArgs,
    model: AnySpec,
    types: Counter[str] | None,
    stored: Scheme | None,
    dtype: str,
    device: DeviceFacts,
    log: DecisionLog,
) -> str:
    """Decides the format of packed weights, none if they are floats. ``stored``: the checkpoint's, if it has one."""
    requested = args.quantization
    if requested == "none":
        return requested
    if isinstance(model, ForeignSpec):
        if requested != "auto":
            raise ConfigError(f"quantization {requested} is for native models: leave it at auto or none", "quantization")
        log.note("quantization", "none", "another library built the model: its weights stay as they are")
        return "none"
    if device.cuda:
        return _on_gpu(args, stored, dtype, device, log)
    if requested in FP8:
        raise ConfigError(f"quantization {requested} is for GPUs: write int8 on a CPU", "quantization")
    if any(isinstance(mlp, MoeSpec) for mlp in model.mlps):
        if requested != "auto":
            raise ConfigError(
                f"quantization {requested} does not pack the experts of a mixture: set quantization none", "quantization"
            )
        log.note("quantization", "none", "the experts of a mixture are not packed")
        return "none"
    compiled = device.native_kernels not in ("", "portable")
    method = NativeMethod if compiled else Int8Method if requested == "int8" else Int4Method
    misfits = [why for outputs, inputs in matrices(model) for why in method.supports(inputs, outputs, "cpu")]
    if requested in ("int8", "int4"):
        if dtype != "bfloat16" and not compiled:
            raise ConfigError(
                f"{requested} with dtype {dtype} needs the native kernels, which are not available here, and PyTorch's packed "
                f"{requested} kernel is made for bfloat16: leave dtype at auto or bfloat16, or set quantization none",
                "quantization",
            )
        if misfits:
            raise ConfigError(f"no packed {requested} kernel fits this model: a matrix has {misfits[0]}", "quantization")
        return requested
    packable = INT4_TYPES | INT8_TYPES if compiled else INT4_TYPES
    if types is None:
        log.note("quantization", "none", "the checkpoint is not a quantised GGUF file")
    elif dtype != "bfloat16" and args.dtype != "auto":
        log.note("quantization", "none", f"the weights are made {dtype}, for exact results")
    elif dtype != "bfloat16" and not compiled:
        log.note("quantization", "none", f"PyTorch's packed kernels are made for bfloat16, and this CPU computes in {dtype}")
    elif others := sorted(types.keys() - packable):
        log.note("quantization", "none", f"no packed kernel here holds {', '.join(others)} as it is")
    elif misfits:
        log.note("quantization", "none", f"no packed kernel fits this model: a matrix has {misfits[0]}")
    else:
        bits = "int4" if types.keys() & INT4_TYPES else "int8"
        whose = f"compiled {device.native_kernels}" if compiled else "PyTorch's"
        log.note("quantization", bits, f"{whose} kernels hold {', '.join(sorted(types))} as it is")
        return bits
    return "none"


def _on_gpu(args: EngineArgs, stored: Scheme | None, dtype: str, device: DeviceFacts, log: DecisionLog) -> str:
    requested = args.quantization
    if requested not in (*FP8, "auto"):
        raise ConfigError(f"quantization {requested} is for CPUs: write fp8 on a GPU", "quantization")
    refusals = [(reason, "quantization") for reason in support.fp8_product_refusals(device.device)]
    if dtype == "float32":
        refusals.append(("its products are of 16-bit activations: set dtype bfloat16 or float16", "dtype"))
    if args.deterministic:
        refusals.append(("it has no product whose rows are independent of each other", "deterministic"))
    if requested in FP8:
        if refusals:
            raise ConfigError(f"quantization {requested}: {refusals[0][0]}", refusals[0][1])
        return requested
    formats = [] if stored is None else [rule.format for rule in stored.rules if rule.format is not None]
    if not formats or any(each.spec.codes != "e4m3" for each in formats):
        log.note("quantization", "none", f"the checkpoint is not of FP8, which kernels here multiply: weights are made {dtype}")
    elif refusals:
        log.note("quantization", "none", f"the checkpoint is of FP8, and weights are made {dtype}: {refusals[0][0]}")
    else:
        log.note("quantization", "stored", "the checkpoint is of FP8, which the GPU multiplies")
        return "stored"
    return "none"


def kv_dtype(args: EngineArgs, model: AnySpec, dtype: str, device: DeviceFacts) -> str:
    """Returns the dtype of the KV cache.

    Raises:
        ConfigError: the device or a layer cannot do with the one that was asked for.
    """
    if args.kv_cache_dtype == "auto":
        return dtype
    if reasons := support.fp8_refusals(device.device):
        raise ConfigError("; ".join(reasons), "kv_cache_dtype")
    for spec in model.layers:
        check_alignment(spec, args.block_size)
    return FP8_KV
