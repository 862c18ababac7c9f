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


def _instead(*advice: tuple[str, str], metavar: str | None = None) -> OptionSpec:
    """Declares (words of other engines, what to write in place of each)."""
    hints = {word: text for words, text in advice for word in words.split()}
    return OptionSpec(hints=MappingProxyType(hints), metavar=metavar)


DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    _instead(("half fp16", _FP16), ("float fp32", _FP32), ("bf16", _BF16)),
]
StateDType = Annotated[Literal["float32", "bfloat16"], _instead(("float fp32", _FP32), ("bf16", _BF16))]
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
    _instead(
        ("wint8 w8a16", _INT8),
        ("wint4 w4a16 bitsandbytes", _INT4),
        ("fp8_per_tensor", _FP8),
        metavar="none|auto|int8|int4|fp8|fp8_per_block|METHOD",
    ),
]
HeadQuantization = Literal["auto", "none", "int8", "int4", "fp8", "fp8_per_block"]
HeadDType = Annotated[Literal["auto", "float32"], _instead(("fp32 float", _FP32), ("model", "write auto"))]
MatrixNames = Annotated[tuple[str, ...], OptionSpec(min=1, default="none", metavar="NAME")]
LoadFormat = Annotated[
    Literal["auto", "safetensors", "gguf", "dummy"],
    _instead(
        ("pt npcache sharded_state tensorizer", _CONVERTED),
        ("hf default default_v1 fastsafetensors layered", "write auto or safetensors"),
    ),
]
Task = Annotated[
    Literal["auto", "generate", "embed", "score"],
    _instead(
        ("embedding encode pooling", "write embed"),
        ("classify reward rerank cross_encoder", "write score"),
        ("completion", "write generate"),
    ),
]
ModelImpl = Annotated[
    Literal["auto", "native", "transformers", "megatron"],
    _instead(
        ("vllm sglang fastdeploy", "write native for headrace's own implementation"),
        ("paddleformers", "write transformers for the library's model with headrace's attention"),
        (
            "paddlefleet",
            "write megatron for a distributed checkpoint of Megatron-core, or hand a trainer's model over with "
            "LLM.from_megatron",
        ),
    ),
]
KVCacheDType = Annotated[
    Literal["auto", "fp8_e4m3"],
    _instead(("fp8 fp8_e5m2", "write fp8_e4m3"), ("bfloat16 bf16 float16 fp16", "write auto, which is the format of --dtype")),
]
LogprobsMode = Annotated[
    Literal["raw_logprobs", "processed_logprobs"],
    _instead(
        ("raw_logits processed_logits", "answers have log-probabilities, whose differences are those of the logits"),
        ("raw", "write raw_logprobs"),
        ("processed", "write processed_logprobs"),
    ),
]
Policy = Literal["fcfs", "priority"]
SparsePrefill = Annotated[
    Literal["auto", "off", "xattn", "mean"],
    _instead(("xattention", "write xattn"), ("flashprefill", "write mean"), ("none dense", "write off")),
]
SparseSelection = Literal["threshold", "upstream"]
YarnFactor = Literal["checkpoint", "positions"]
RoutingPolicy = Annotated[
    Literal["prefix", "least-tokens", "round-robin", "random", "session"],
    _instead(
        ("cache_aware cache-aware", "write prefix"),
        ("power_of_two shortest_queue minimum_tokens total_tokens", "write least-tokens"),
        ("round_robin", "write round-robin"),
        ("consistent_hash", "write session"),
    ),
]
GenerationConfig = Literal["auto", "vllm"]
Device = Annotated[Literal["auto", "cpu", "cuda"], _instead(("gpu", "write cuda"))]
MMEncoder = Literal["auto", "none"]
GrammarBackend = Annotated[
    Literal["auto", "guidance", "llguidance"], _instead(("xgrammar outlines lm-format-enforcer", _LIBRARY))
]
"""Names of one backend: vLLM's, and the library's, which is SGLang's too."""
Modality = Literal["image", "video", "audio"]
"""Kinds of media, as ``limit_mm_per_prompt`` and the parts of prompts name them."""
MEDIA_NAMES: dict[Modality, str] = {"image": "images", "video": "videos", "audio": "audio clips"}
"""Several media of a kind, in messages."""
