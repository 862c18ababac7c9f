"""A hybrid with random weights on a CPU in headrace, llama.cpp and transformers: LFM2, 12 layers of width 1,024.

    python benchmarks/hybrid_cpu.py make FOLDER                   # a checkpoint in bfloat16, and GGUF files of the same weights
    python benchmarks/hybrid_cpu.py headrace FOLDER --bits 8
    python benchmarks/hybrid_cpu.py llamacpp FOLDER --bits 8      # needs xllamacpp, which may be in an environment of its own
    python benchmarks/hybrid_cpu.py transformers FOLDER

Each engine runs in one thread, and reports tokens a second of processor time, best of several rounds, as JSON: what else the
machine does then counts little. Prompts are random, and none begins as another does.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

VOCAB = 32_000
BITS = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}
CASES = {"prompt 512": (1, 512, 1), "decode, 1 sequence": (1, 16, 65), "decode, 8 sequences": (8, 16, 65)}
"""Name -> sequences, tokens of a prompt, tokens of an answer."""
app = typer.Typer()
Folder = Annotated[Path, typer.Argument()]
Bits = Annotated[int, typer.Option(help="Bits of weights: 16, 8 or 4.")]


@app.command()
def make(folder: Folder) -> None:
    """Writes the checkpoint and the GGUF files."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention"] * 4,
    )
    model = Lfm2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    for kind in BITS.values():
        _write_gguf(folder / f"{kind}.gguf", model, kind)


def _write_gguf(path: Path, model: Any, kind: str) -> None:
    import gguf
    import torch

    config, writer = model.config, gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (one == "full_attention") for one in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 0"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.startswith("lm_head"):
            continue
        values = tensor.squeeze(1) if ".conv.conv." in name else tensor
        matrix = values.dim() == 2 and ".conv.conv." not in name
        stored = gguf.GGMLQuantizationType[kind if matrix else "F32"]
        floats = values.to(torch.float32).numpy()
        data = gguf.quants.quantize(floats, stored) if matrix else floats
        own = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(str(own), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _measure(engine: str, generate: Callable[[list[list[int]], int], None], rounds: int, **facts: Any) -> None:
    """``generate(prompts, n)`` makes n tokens behind each prompt."""
    draw = random.Random(1)
    rates: dict[str, float] = {}
    for name, (sequences, length, tokens) in CASES.items():
        best = 0.0
        for _ in range(rounds):
            prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(sequences)]
            begun = time.process_time()
            generate(prompts, 1)
            first = time.process_time()
            if tokens > 1:
                # The same prompts would be found in a cache.
                generate([[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(sequences)], tokens)
                seconds = (time.process_time() - first) - (first - begun)
                best = max(best, sequences * (tokens - 1) / seconds)
            else:
                best = max(best, length / (first - begun))
        rates[name] = round(best, 1)
    print(json.dumps({"engine": engine, **facts, "tokens_per_cpu_second": rates, "load": os.getloadavg()[0]}))


@app.command()
def headrace(folder: Folder, bits: Bits = 16, rounds: int = 3) -> None:
    from headrace import LLM, SamplingParams

    options: dict[str, Any] = {"quantization": f"int{bits}"} if bits < 16 else {}
    with LLM(
        str(folder), num_threads=1, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=8, dtype="bfloat16", **options
    ) as llm:

        def generate(prompts: list[list[int]], tokens: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

        generate([[5] * 40], 4)
        _measure("headrace", generate, rounds, bits=bits, native=os.environ.get("HEADRACE_NATIVE", "native"))


@app.command()
def llamacpp(folder: Folder, bits: Bits = 16, rounds: int = 3) -> None:
    """Its server within this process, whose scheduler batches the sequences."""
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(folder / f"{BITS[bits]}.gguf")
    params.n_parallel, params.n_ctx, params.warmup, params.verbosity = 8, 8192, True, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(8)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        def one(prompt: list[int]) -> None:
            body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
            answer = server.handle_completions(body)
            assert answer["usage"]["completion_tokens"] == tokens, answer

        list(pool.map(one, prompts))

    generate([[5] * 40], 4)
    _measure("llama.cpp", generate, rounds, bits=bits, system=xllamacpp.get_system_info())


@app.command()
def transformers(folder: Folder, rounds: int = 1) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    _measure("transformers", generate, rounds, bits=16)


if __name__ == "__main__":
    app()
