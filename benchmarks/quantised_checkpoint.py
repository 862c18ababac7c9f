"""Writes a random quantised checkpoint, and compares what headrace and vLLM compute with it.

    python benchmarks/quantised_checkpoint.py write MODEL FOLDER --format fp8_block --layers 4
    python benchmarks/quantised_checkpoint.py answer FOLDER --engine headrace --output ours.json
    python benchmarks/quantised_checkpoint.py answer FOLDER --engine vllm --output theirs.json
    python benchmarks/quantised_checkpoint.py compare ours.json theirs.json

MODEL is a folder with a config.json of Qwen3, dense or a mixture. Weights are normal with a deviation of 0.02, rounded to the
nearest. ``answer`` imports one engine alone, so that each may have packages of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP = 128
PER_FILE = 4
"""Layers of a file."""
PROMPTS, TOKENS, TOP = 16, 48, 20
"""Prompts, the tokens of each, and how many logprobs are compared."""
Matrix = dict[str, torch.Tensor]


def fp8(weight: torch.Tensor) -> Matrix:
    """A scale for each output, as ``FP8_DYNAMIC`` of compressed-tensors."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales.bfloat16()}


def fp8_block(weight: torch.Tensor) -> Matrix:
    """A scale for each 128 x 128, as DeepSeek and Qwen store them. Sizes are multiples of 128."""
    rows, columns = weight.shape
    tiles = weight.view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scales = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scales[:, None, :, None]).view(rows, columns)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _symmetric(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 4 bits about 8, and scales for each 128 inputs."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7).half()
    codes = (groups / scales[..., None].float()).round().clamp(-8, 7) + 8
    return codes.view(weight.shape).int(), scales


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Packs eight neighbours of the last axis, the first in the lowest bits."""
    split = codes.view(len(codes), -1, 8)
    words = torch.zeros(split.shape[:2], dtype=torch.int32)
    for place in range(8):
        words |= split[..., place] << 4 * place
    return words


def gptq(weight: torch.Tensor) -> Matrix:
    codes, scales = _symmetric(weight)
    rows, columns = weight.shape
    return {
        "qweight": _words(codes).t().contiguous(),
        "qzeros": torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def w4a16(weight: torch.Tensor) -> Matrix:
    """``W4A16`` of compressed-tensors."""
    codes, scales = _symmetric(weight)
    return {"weight_packed": _words(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    whole = {"config_groups": {"group_0": group}, "format": kind, "ignore": ["lm_head", "re:.*mlp.gate$"]}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None, **whole}


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "actorder": None, "observer": "minmax"}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, "strategy": "group", "dynamic": False}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8": (
        fp8,
        _compressed(
            "float-quantized",
            _FP8 | {"strategy": "channel", "dynamic": False},
            _FP8 | {"strategy": "token", "dynamic": True, "observer": None},
        ),
    ),
    "fp8_block": (
        fp8_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [GROUP, GROUP],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "w4a16": (w4a16, _compressed("pack-quantized", _INT4 | {"actorder": None, "observer": "minmax"}, None)),
}


def matrices(config: dict[str, Any], layer: int) -> Iterator[tuple[str, int, int]]:
    """Names, outputs and inputs of a layer's quantised matrices."""
    hidden, width = config["hidden_size"], config["head_dim"]
    prefix, heads, kv_heads = f"model.layers.{layer}.", config["num_attention_heads"], config["num_key_value_heads"]
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{prefix}self_attn.{name}_proj", count * width, hidden
    yield f"{prefix}self_attn.o_proj", hidden, heads * width
    experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    for each in [f"mlp.experts.{expert}." for expert in range(experts)] or ["mlp."]:
        yield f"{prefix}{each}gate_proj", inner, hidden
        yield f"{prefix}{each}up_proj", inner, hidden
        yield f"{prefix}{each}down_proj", hidden, inner


def tensors_of(config: dict[str, Any], layer: int, quantise: Any, random_matrix: Any) -> Matrix:
    hidden, width, prefix = config["hidden_size"], config["head_dim"], f"model.layers.{layer}."
    held = {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    held |= {f"{prefix}self_attn.{name}.weight": torch.ones(width) for name in ("q_norm", "k_norm")}
    if config.get("num_experts"):
        held[f"{prefix}mlp.gate.weight"] = random_matrix(config["num_experts"], hidden)
    held = {name: tensor.bfloat16() for name, tensor in held.items()}
    for name, rows, columns in matrices(config, layer):
        held |= {f"{name}.{leaf}": tensor for leaf, tensor in quantise(random_matrix(rows, columns)).items()}
    return held


def write(options: argparse.Namespace) -> None:
    config = json.loads((options.model / "config.json").read_text())
    layers = config["num_hidden_layers"] = min(options.layers or config["num_hidden_layers"], config["num_hidden_layers"])
    quantise, config["quantization_config"] = FORMATS[options.format]
    generator = torch.Generator().manual_seed(options.seed)

    def random_matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    options.folder.mkdir(parents=True, exist_ok=True)
    index = {}

    def save(name: str, held: Matrix) -> None:
        save_file(held, options.folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(held, name))

    size = config["vocab_size"], config["hidden_size"]
    ends = {"model.embed_tokens.weight": random_matrix(*size).bfloat16(), "model.norm.weight": torch.ones(size[1]).bfloat16()}
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = random_matrix(*size).bfloat16()
    save("ends.safetensors", ends)
    for first in range(0, layers, PER_FILE):
        held: Matrix = {}
        for layer in range(first, min(first + PER_FILE, layers)):
            held |= tensors_of(config, layer, quantise, random_matrix)
        save(f"layers-{first}.safetensors", held)
    (options.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))


def answer(options: argparse.Namespace) -> None:
    """The log-probabilities of the most likely tokens after each prompt."""
    if options.engine == "headrace":
        from headrace import LLM, SamplingParams
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM, SamplingParams
    llm = LLM(model=str(options.folder), skip_tokenizer_init=True, max_model_len=512, max_logprobs=TOP, **options.option)
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(100, 20000) for _ in range(TOKENS)]} for _ in range(PROMPTS)]
    results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP, detokenize=False))
    rows = [{token: one.logprob for token, one in result.outputs[0].logprobs[0].items()} for result in results]
    options.output.write_text(json.dumps(rows))


def compare(options: argparse.Namespace) -> None:
    ours, theirs = (json.loads(path.read_text()) for path in (options.ours, options.theirs))
    both = [(row[token], other[token]) for row, other in zip(ours, theirs, strict=True) for token in row.keys() & other.keys()]
    same = sum(max(row, key=row.get) == max(other, key=other.get) for row, other in zip(ours, theirs, strict=True))
    furthest = max(abs(left - right) for left, right in both)
    spread = max(max(row.values()) - min(row.values()) for row in ours)
    print(f"{same} of {len(ours)} tokens are the same; of {len(both)} common logprobs the furthest are {furthest:.3f} apart,")
    print(f"where a row's most likely {TOP} are within {spread:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("write")
    one.add_argument("model", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("--format", choices=FORMATS, required=True)
    one.add_argument("--layers", type=int, help="the first so many; all by default")
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(run=write)
    two = commands.add_parser("answer")
    two.add_argument("folder", type=Path)
    two.add_argument("--engine", choices=("headrace", "vllm"), required=True)
    two.add_argument("--output", type=Path, required=True)
    two.add_argument("--option", type=json.loads, default={}, help="further arguments of LLM, as JSON")
    two.set_defaults(run=answer)
    three = commands.add_parser("compare")
    three.add_argument("ours", type=Path)
    three.add_argument("theirs", type=Path)
    three.set_defaults(run=compare)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
