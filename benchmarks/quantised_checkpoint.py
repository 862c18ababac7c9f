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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP = 128
PER_FILE, SAVING = 4, 4
"""Layers of a file, and files that are written at the same time."""
PROMPTS, TOKENS, TOP = 16, 48, 20
"""Prompts, the tokens of each, and how many logprobs are compared."""
Matrix = dict[str, torch.Tensor]


Quantise = Callable[[torch.Tensor], Matrix]
E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from the lowest, of each of its eight codes."""


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


def fp8_tensor(weight: torch.Tensor) -> Matrix:
    """One scale for the matrix, and a static one for activations."""
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale, "input_scale": torch.tensor(0.02)}


def fbgemm(weight: torch.Tensor) -> Matrix:
    held = fp8(weight)
    return held | {"weight_scale": held["weight_scale"].float()}


def _integers(weight: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, and scales and zero points for each 128 inputs."""
    groups, top = weight.view(len(weight), -1, GROUP), 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (top // 2)).half()
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(0, top)
    codes = (groups / scales[..., None].float() + zeros[..., None].float()).round().clamp(0, top)
    return codes.view(weight.shape).int(), scales, zeros.int()


def _words(codes: torch.Tensor, bits: int = 4, places: Sequence[int] | None = None) -> torch.Tensor:
    """Packs neighbours of the last axis, the first in the lowest bits unless ``places`` says otherwise."""
    per = 32 // bits
    split = codes.view(len(codes), -1, per)
    words = torch.zeros(split.shape[:2], dtype=torch.int32)
    for number, place in enumerate(places or range(per)):
        words |= split[..., number] << bits * place
    return words


def gptq(weight: torch.Tensor, bits: int = 4, symmetric: bool = True, act_order: bool = False) -> Matrix:
    order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    if act_order:
        # The groups of all matrices of a layer lie alike, as those of matrices with the same inputs do.
        place = torch.randperm(len(order), generator=torch.Generator().manual_seed(len(order)))
        weight, order = weight[:, place], order[place.argsort()]
        codes, scales, zeros = _integers(weight, bits, symmetric)
        codes = codes[:, place.argsort()]
    else:
        codes, scales, zeros = _integers(weight, bits, symmetric)
    return {
        "qweight": _words(codes, bits).t().contiguous(),
        "qzeros": _words((zeros.t() - 1) % 2**bits, bits),
        "scales": scales.t().contiguous(),
        "g_idx": order,
    }


def awq(weight: torch.Tensor) -> Matrix:
    codes, scales, zeros = _integers(weight, 4, symmetric=False)
    return {
        "qweight": _words(codes.t().contiguous(), 4, AWQ_PLACES),
        "qzeros": _words(zeros.t().contiguous(), 4, AWQ_PLACES),
        "scales": scales.t().contiguous(),
    }


def packed(weight: torch.Tensor, bits: int = 4, symmetric: bool = True) -> Matrix:
    """``W4A16``, ``W8A16`` and ``W4A16_ASYM`` of compressed-tensors."""
    codes, scales, zeros = _integers(weight, bits, symmetric)
    held = {"weight_packed": _words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return held if symmetric else held | {"weight_zero_point": _words(zeros.t().contiguous(), bits).t().contiguous()}


def int8(weight: torch.Tensor) -> Matrix:
    """``W8A8`` of compressed-tensors."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales.bfloat16()}


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Two numbers of 4 bits in a byte, the first in the lower half."""
    codes = torch.bucketize(values.abs(), (E2M1[1:] + E2M1[:-1]) / 2).to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, scales of 16 inputs, and the factor of the matrix."""
    groups = weight.view(len(weight), -1, 16)
    factor = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
    return _e2m1((groups / (scales.float() * factor)[..., None]).view(weight.shape)), scales, factor


def nvfp4(weight: torch.Tensor) -> Matrix:
    codes, scales, factor = _nvfp4(weight)
    given = {"weight_global_scale": (1 / factor)[None], "input_global_scale": torch.tensor([100.0])}
    return {"weight_packed": codes, "weight_scale": scales, **given}


def modelopt_nvfp4(weight: torch.Tensor) -> Matrix:
    codes, scales, factor = _nvfp4(weight)
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.01)}


def mxfp4(weight: torch.Tensor) -> Matrix:
    groups = weight.view(len(weight), -1, 32)
    exponents = (groups.abs().amax(2) / 6).log2().ceil()
    codes = _e2m1((groups / exponents.exp2()[..., None]).view(weight.shape))
    return {"weight_packed": codes, "weight_scale": (exponents + 127).to(torch.uint8)}


def w4afp8(weight: torch.Tensor) -> Matrix:
    """Experts of ``w4afp8``; the rest is ``fp8_block``."""
    codes, scales, _ = _integers(weight, 4, symmetric=True)
    signed = (codes - 8).to(torch.int8)
    both = (signed[:, ::2] & 15) | (signed[:, 1::2] << 4)
    return {"weight": both, "weight_scale_inv": scales.bfloat16(), "input_scale": torch.tensor(0.02)}


IGNORED = ["lm_head", "re:.*mlp.gate$"]


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    whole = {"config_groups": {"group_0": group}, "format": kind, "ignore": IGNORED}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None, **whole}


def _gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, **changes}


_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head", "*mlp.gate"]}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "actorder": None, "observer": "minmax"}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_INT = {"type": "int", "symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax"}
_INT4 = {**_INT, "num_bits": 4, "group_size": GROUP, "strategy": "group"}
_TOKENS = {"strategy": "token", "dynamic": True, "observer": None}
_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [GROUP, GROUP],
    "modules_to_not_convert": ["lm_head"],
}
FORMATS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "fp8": (fp8, _compressed("float-quantized", _FP8 | {"strategy": "channel", "dynamic": False}, _FP8 | _TOKENS)),
    "fp8_block": (fp8_block, {"quant_method": "fp8", **_BLOCKS}),
    "fp8_tensor": (
        fp8_tensor,
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
    ),
    "fbgemm_fp8": (
        fbgemm,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "modelopt_fp8": (fp8_tensor, {**_MODELOPT, "quant_algo": "FP8"}),
    "modelopt_nvfp4": (modelopt_nvfp4, {**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16}),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", {**_FP4, "strategy": "tensor_group", "group_size": 16})),
    "mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", {**_FP4, "strategy": "group", "group_size": 32})),
    "int8": (
        int8,
        _compressed("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}, {**_INT, "num_bits": 8, **_TOKENS}),
    ),
    "w4a16": (packed, _compressed("pack-quantized", _INT4)),
    "w4a16_asym": (partial(packed, symmetric=False), _compressed("pack-quantized", _INT4 | {"symmetric": False})),
    "w8a16": (partial(packed, bits=8), _compressed("pack-quantized", _INT4 | {"num_bits": 8})),
    "gptq": (gptq, _gptq()),
    "gptq_asym": (partial(gptq, symmetric=False), _gptq(sym=False)),
    "gptq_act_order": (partial(gptq, act_order=True), _gptq(desc_act=True)),
    "gptq_8bit": (partial(gptq, bits=8), _gptq(bits=8)),
    "auto_round": (gptq, _gptq(quant_method="auto-round", packing_format="auto_round:auto_gptq")),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head", "mlp.gate"],
        },
    ),
    "w4afp8": (fp8_block, {"quant_method": "w4afp8", "group_size": GROUP, **_BLOCKS}),
}
EXPERTS: dict[str, Quantise] = {"w4afp8": w4afp8}
"""Formats of which experts are quantised otherwise than the rest."""


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


def tensors_of(config: dict[str, Any], layer: int, name: str, random_matrix: Any) -> Matrix:
    """``name``: of the format."""
    quantise = FORMATS[name][0]
    experts = EXPERTS.get(name, quantise)
    hidden, width, prefix = config["hidden_size"], config["head_dim"], f"model.layers.{layer}."
    held = {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    held |= {f"{prefix}self_attn.{name}.weight": torch.ones(width) for name in ("q_norm", "k_norm")}
    if config.get("num_experts"):
        held[f"{prefix}mlp.gate.weight"] = random_matrix(config["num_experts"], hidden)
    held = {name: tensor.bfloat16() for name, tensor in held.items()}
    for module, rows, columns in matrices(config, layer):
        stored = (experts if ".experts." in module else quantise)(random_matrix(rows, columns))
        held |= {f"{module}.{leaf}": tensor for leaf, tensor in stored.items()}
    return held


def write(options: argparse.Namespace) -> None:
    config = json.loads((options.model / "config.json").read_text())
    layers = config["num_hidden_layers"] = min(options.layers or config["num_hidden_layers"], config["num_hidden_layers"])
    scheme = config["quantization_config"] = FORMATS[options.format][1]
    if not config.get("num_experts") and scheme["quant_method"] == "awq":
        # vLLM would find the router's name in that of gate and up.
        config["quantization_config"] = {**scheme, "modules_to_not_convert": ["lm_head"]}
    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(options.seed)

    def random_matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device) * 0.02

    options.folder.mkdir(parents=True, exist_ok=True)
    index = {}

    def save(name: str, held: Matrix) -> None:
        index.update(dict.fromkeys(held, name))
        on_host = {name: tensor.cpu() for name, tensor in held.items()}
        saving.append(pool.submit(save_file, on_host, options.folder / name, metadata={"format": "pt"}))

    size = config["vocab_size"], config["hidden_size"]
    ends = {"model.embed_tokens.weight": random_matrix(*size).bfloat16(), "model.norm.weight": torch.ones(size[1]).bfloat16()}
    if not config["tie_word_embeddings"]:
        ends["lm_head.weight"] = random_matrix(*size).bfloat16()
    saving: list[Future[None]] = []
    with ThreadPoolExecutor(SAVING) as pool:
        save("ends.safetensors", ends)
        for first in range(0, layers, PER_FILE):
            held: Matrix = {}
            for layer in range(first, min(first + PER_FILE, layers)):
                held |= tensors_of(config, layer, options.format, random_matrix)
            save(f"layers-{first}.safetensors", held)
    for one in saving:
        one.result()
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
    one.add_argument("--device", default="cpu", help="where numbers are drawn and rounded; other devices draw others")
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
