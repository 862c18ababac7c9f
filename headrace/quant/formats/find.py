"""Finds the scheme of a checkpoint from its configuration, or says why its format is not read and what would be."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import ConfigError
from headrace.options import shown
from headrace.quant.formats.compressed_tensors import compressed_tensors
from headrace.quant.formats.fp8 import fbgemm_fp8, fp8, modelopt, w4afp8
from headrace.quant.formats.gptq import auto_round, awq, gptq
from headrace.quant.formats.microscaled import mxfp4
from headrace.quant.formats.scheme import Fields, Scheme

_METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "mxfp4": mxfp4,
    "w4afp8": w4afp8,
}
_ALIASES = {"compressed_tensors": "compressed-tensors", "intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}
_SAME = {
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "modelopt_fp4": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
}
"""Names that other engines have for a method -> the method."""
_AGAIN = "quantise the original checkpoint again and save it as compressed-tensors, gptq or awq"
_REFUSED = {
    "bitsandbytes": f"its 4-bit tables and int8 outliers are not read: {_AGAIN}, or serve the original with quantization int8",
    "torchao": "its tensor subclasses are not read: save the checkpoint as compressed-tensors",
    "quark": "its layouts are not read: export the checkpoint as compressed-tensors or fp8",
    "aqlm": f"its codebooks are not read: {_AGAIN}",
    "vptq": f"its codebooks are not read: {_AGAIN}",
    "hqq": f"its layouts are not read: {_AGAIN}",
    "eetq": f"its permuted int8 is not read: {_AGAIN}",
    "quanto": f"its tensor subclasses are not read: {_AGAIN}",
    "higgs": f"its rotated grids are not read: {_AGAIN}",
    "spqr": f"its sparse outliers are not read: {_AGAIN}",
    "fp_quant": f"its rotations are not read: {_AGAIN}",
    "bitnet": "its ternary matrices are not read: serve the checkpoint in bfloat16 or as GGUF",
    "w4a8": "its layout is not documented: save the checkpoint as compressed-tensors or w4afp8",
    "wint4": "its layout is not documented: save the checkpoint as compressed-tensors",
    "wint8": "its layout is not documented: save the checkpoint as compressed-tensors",
}
"""Methods that are known and not read -> why, and what would do instead."""


def method_name(name: str) -> str:
    """Returns our name of a method that other engines may call otherwise."""
    return _SAME.get(name, name)


def find_scheme(config: object) -> Scheme | None:
    """Reads the number formats of a checkpoint's matrices; None: all are floats.

    Args:
        config: a Hugging Face configuration, of the decoder or of a model around it.

    Raises:
        ConfigError: a format or a field of it is not supported; names it, and what would do instead.
    """
    parts = (config, getattr(config, "text_config", None))
    values = next((found for part in parts if (found := getattr(part, "quantization_config", None)) is not None), None)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(f"quantization_config is {shown(values)}: it must be an object", "quantization_config")
    method = values.get("quant_method")
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if not isinstance(method, str) or method not in _METHODS:
        why = _REFUSED.get(str(method), f"supported are: {', '.join(_METHODS)}")
        raise ConfigError(f"quantization_config: quant_method {shown(method)} is not supported: {why}", "quantization_config")
    return _METHODS[method](Fields(method, values))
