"""The words that options take, and what to write in place of words that other engines take."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from headrace.options import OptionSpec

_FP16, _FP32, _BF16 = "write float16", "write float32", "write bfloat16"
_CONVERTED = "weights are read from safetensors and GGUF files: convert the checkpoint"
_INT8 = "write int8, which quantises any checkpoint while it loads"
_INT4 = "write int4, which quantises any checkpoint while it loads"
_FP8 = "write fp8, which has a scale for each output"
_LIBRARY = "llguidance holds structured output here: leave the option out"

DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    OptionSpec(hints=MappingProxyType({"half": _FP16, "fp16": _FP16, "float": _FP32, "fp32": _FP32, "bf16": _BF16})),
]
StateDType = Annotated[
    Literal["float32", "bfloat16"],
    OptionSpec(hints=MappingProxyType({"float": _FP32, "fp32": _FP32, "bf16": _BF16})),
]
Quantization = Annotated[
    Literal[
        "none",
        "auto",
        "int8",
        "int4",
        "fp8",
        "fp8_per_channel",
        "fp8_per_block",
        "awq",
        "awq_marlin",
        "auto_awq",
        "gptq",
        "gptq_marlin",
        "auto_gptq",
        "auto-round",
        "compressed-tensors",
        "modelopt",
        "modelopt_fp4",
        "fbgemm_fp8",
        "mxfp4",
        "gpt_oss_mxfp4",
        "w4afp8",
        "gguf",
    ],
    OptionSpec(
        metavar="none|auto|int8|int4|fp8|fp8_per_block|METHOD",
        hints=MappingProxyType(
            {"wint8": _INT8, "w8a16": _INT8, "wint4": _INT4, "w4a16": _INT4, "bitsandbytes": _INT4, "fp8_per_tensor": _FP8}
        ),
    ),
]
HeadQuantization = Literal["auto", "none", "int8", "int4", "fp8", "fp8_per_block"]
HeadDType = Annotated[
    Literal["auto", "float32"],
    OptionSpec(hints=MappingProxyType(dict.fromkeys(("fp32", "float"), _FP32) | {"model": "write auto"})),
]
MatrixNames = Annotated[tuple[str, ...], OptionSpec(min=1, default="none", metavar="NAME")]
LoadFormat = Annotated[
    Literal["auto", "safetensors", "gguf", "dummy"],
    OptionSpec(
        hints=MappingProxyType(
            dict.fromkeys(("pt", "npcache", "sharded_state", "tensorizer"), _CONVERTED)
            | dict.fromkeys(("hf", "default", "default_v1", "fastsafetensors", "layered"), "write auto or safetensors")
        )
    ),
]
Task = Annotated[
    Literal["auto", "generate", "embed", "score"],
    OptionSpec(
        hints=MappingProxyType(
            dict.fromkeys(("embedding", "encode", "pooling"), "write embed")
            | dict.fromkeys(("classify", "reward", "rerank", "cross_encoder"), "write score")
            | {"completion": "write generate"}
        )
    ),
]
ModelImpl = Annotated[
    Literal["auto", "native", "transformers", "megatron"],
    OptionSpec(
        hints=MappingProxyType(
            dict.fromkeys(("vllm", "sglang", "fastdeploy"), "write native for headrace's own implementation")
            | {
                "paddleformers": "write transformers for the library's model with headrace's attention",
                "paddlefleet": "write megatron for a distributed checkpoint of Megatron-core, or hand a trainer's model over "
                "with LLM.from_megatron",
            }
        )
    ),
]
KVCacheDType = Annotated[
    Literal["auto", "fp8_e4m3"],
    OptionSpec(
        hints=MappingProxyType(
            dict.fromkeys(("fp8", "fp8_e5m2"), "write fp8_e4m3")
            | dict.fromkeys(("bfloat16", "bf16", "float16", "fp16"), "write auto, which is the format of --dtype")
        )
    ),
]
LogprobsMode = Annotated[
    Literal["raw_logprobs", "processed_logprobs"],
    OptionSpec(
        hints=MappingProxyType(
            dict.fromkeys(
                ("raw_logits", "processed_logits"), "answers have log-probabilities, whose differences are those of the logits"
            )
            | {"raw": "write raw_logprobs", "processed": "write processed_logprobs"}
        )
    ),
]
Policy = Literal["fcfs", "priority"]
SparsePrefill = Annotated[
    Literal["auto", "off", "xattn", "mean"],
    OptionSpec(
        hints=MappingProxyType(
            {"xattention": "write xattn", "flashprefill": "write mean", "none": "write off", "dense": "write off"}
        )
    ),
]
SparseSelection = Literal["threshold", "upstream"]
YarnFactor = Literal["checkpoint", "positions"]
RoutingPolicy = Annotated[
    Literal["prefix", "least-tokens", "round-robin", "random", "session"],
    OptionSpec(
        hints=MappingProxyType(
            dict.fromkeys(("cache_aware", "cache-aware"), "write prefix")
            | dict.fromkeys(("power_of_two", "shortest_queue", "minimum_tokens", "total_tokens"), "write least-tokens")
            | {"round_robin": "write round-robin", "consistent_hash": "write session"}
        )
    ),
]
GenerationConfig = Literal["auto", "vllm"]
Device = Annotated[Literal["auto", "cpu", "cuda"], OptionSpec(hints=MappingProxyType({"gpu": "write cuda"}))]
MMEncoder = Literal["auto", "none"]
GrammarBackend = Annotated[
    Literal["auto", "guidance", "llguidance"],
    OptionSpec(hints=MappingProxyType(dict.fromkeys(("xgrammar", "outlines", "lm-format-enforcer"), _LIBRARY))),
]
"""Names of one backend: vLLM's, and the library's, which is SGLang's too."""
Modality = Literal["image", "video", "audio"]
"""Kinds of media, as ``limit_mm_per_prompt`` and the parts of prompts name them."""
MEDIA_NAMES: dict[Modality, str] = {"image": "images", "video": "videos", "audio": "audio clips"}
"""Several media of a kind, in messages."""
