"""Two models on a CPU in headrace, llama.cpp and transformers, in one sitting.

    pip install xllamacpp                                         # llama.cpp as a wheel; an environment of its own will do
    python benchmarks/cpu_peers.py make FOLDER                    # a hybrid with random weights, and GGUF files of the same
    python benchmarks/cpu_peers.py run FOLDER --llama-python python

The hybrid is LFM2, 12 layers of width 1,024. The other is the embedded model, on a CPU with AVX2 alone: headrace's kernels are
compiled for it, and PyTorch's are held to it; llama.cpp's wheel is compiled for it in any case.

Every engine has a process of its own, which lives throughout: for each row they run in turns, ``--rounds`` times, and the best
time of each counts. Prompts are random, and none begins as another does. Decoding is the best time of a run less the best
of one with one token of output. Rates are tokens a second, and in brackets tokens a second of processor time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

VOCAB = 32_000
BITS = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}
AVX2 = {
    "HEADRACE_NATIVE": "x86-64-v3",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
CASES = {
    "prompt of 512": (1, 512, 1),
    "decode, 1 sequence": (1, 16, 49),
    "decode, 1 sequence behind 512 tokens": (1, 512, 65),
    "decode, 8 sequences": (8, 16, 33),
    "decode, 32 sequences": (32, 16, 17),
}
"""Name -> sequences, tokens of a prompt, tokens of an answer."""
SEQUENCES, CONTEXT = 32, 1024
Generate = Callable[[list[list[int]], int], None]
"""``generate(prompts, n)`` makes n tokens behind each prompt."""
app = typer.Typer()
Folder = Annotated[Path, typer.Argument(help="Of the hybrid.")]
Bits = Annotated[int, typer.Option(help="Bits of weights: 16, 8 or 4.")]
Threads = Annotated[int, typer.Option()]
File = Annotated[Path | None, typer.Option(help="A GGUF file in place of the hybrid, whose weights stay as they are.")]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A process that runs a case for each line that it reads."""

    name: str
    process: subprocess.Popen[str]

    def ask(self, case: str) -> dict[str, float]:
        """The seconds and the processor seconds of a run with one token of output, and of the whole."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(case + "\n")
                self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, float]:
        """The next answer, the first of which says that the engine is warm. Empty: it says nothing else, or is gone."""
        lines = self.process.stdout or ()
        return next((dict(json.loads(line)) for line in lines if line.startswith("{")), {})


@app.command()
def run(
    folder: Folder,
    llama_python: Annotated[str, typer.Option(help="A Python that imports xllamacpp.")] = sys.executable,
    threads: Threads = 2,
    rounds: int = 2,
    budget: Annotated[float, typer.Option(help="Seconds after which no round begins.")] = 240.0,
) -> None:
    """Measures everything, and prints tables in Markdown."""
    from headrace.sources.embedded import find

    begun, file = time.monotonic(), str(find())
    hybrid = {
        "headrace, int8": (sys.executable, "headrace", "--bits", "8"),
        "llama.cpp, Q8_0": (llama_python, "llamacpp", "--bits", "8"),
        "headrace, bfloat16": (sys.executable, "headrace", "--bits", "16"),
        "llama.cpp, BF16": (llama_python, "llamacpp", "--bits", "16"),
        "transformers, bfloat16": (sys.executable, "transformers", "--bits", "16"),
    }
    narrow = {
        "headrace, AVX2": (sys.executable, "headrace", "--file", file),
        "llama.cpp, AVX2": (llama_python, "llamacpp", "--file", file),
        "transformers, float32, AVX2": (sys.executable, "transformers", "--file", file),
    }
    print(f"{threads} threads; load average {os.getloadavg()[0]:.2f}", flush=True)
    for title, commands, environment, share in (("Hybrid", hybrid, {}, 0.6), ("Embedded model", narrow, AVX2, 1.0)):
        engines = [
            Engine(
                name,
                subprocess.Popen(
                    [python, __file__, command, str(folder), "--threads", str(threads), *options],
                    env=os.environ | environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                ),
            )
            for name, (python, command, *options) in commands.items()
        ]
        for engine in engines:
            engine.answer()
        best: dict[tuple[str, str], dict[str, float]] = {}
        done = 0
        while done < rounds and (done == 0 or time.monotonic() - begun < share * budget):
            for case in CASES:
                for engine in engines:
                    got = engine.ask(case)
                    old = best.setdefault((case, engine.name), got)
                    old.update({kind: min(value, old.get(kind, value)) for kind, value in got.items()})
            done += 1
        for engine in engines:
            engine.process.kill()
            engine.process.wait()
        print(f"\n{title}, {done} rounds, tokens a second (of processor time)\n")
        print("| | " + " | ".join(commands) + " |\n| --- |" + " ---: |" * len(commands))
        for case in CASES:
            cells = (_cell(case, best[case, name]) for name in commands)
            print(f"| {case} | " + " | ".join(cells) + " |", flush=True)
    print(f"\n{time.monotonic() - begun:.0f} seconds; load average {os.getloadavg()[0]:.2f}")


def _cell(case: str, seconds: dict[str, float]) -> str:
    """The rates of a case: of its prompts, or of what follows the first tokens."""
    if not seconds:
        return "failed"
    sequences, length, tokens = CASES[case]
    if tokens == 1:
        return "{:,.1f} ({:,.1f})".format(*(sequences * length / seconds[kind] for kind in ("wall", "cpu")))
    spans = [seconds[f"{kind}, whole"] - seconds[kind] for kind in ("wall", "cpu")]
    return "{:,.1f} ({:,.1f})".format(*(sequences * (tokens - 1) / span for span in spans)) if min(spans) > 0 else "too noisy"


def _serve(generate: Generate) -> None:
    """Answers lines with the name of a case."""
    draw = random.Random(1)

    def seconds(sequences: int, length: int, tokens: int) -> dict[str, float]:
        prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(sequences)]
        begun = time.perf_counter(), time.process_time()
        generate(prompts, tokens)
        return {"wall": time.perf_counter() - begun[0], "cpu": time.process_time() - begun[1]}

    seconds(2, 40, 4)
    print("{}", flush=True)
    for line in sys.stdin:
        sequences, length, tokens = CASES[line.strip()]
        first = seconds(sequences, length, 1)
        whole = seconds(sequences, length, tokens) if tokens > 1 else {}
        print(json.dumps(first | {f"{kind}, whole": value for kind, value in whole.items()}), flush=True)


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


@app.command()
def headrace(folder: Folder, bits: Bits = 16, threads: Threads = 1, file: File = None) -> None:
    from headrace import LLM, SamplingParams

    options: dict[str, Any] = {"dtype": "bfloat16"}
    if file is not None:
        options = {"dtype": "float32", "quantization": "int4"}
    elif bits < 16:
        options["quantization"] = f"int{bits}"
    model = str(file or folder)
    options |= {"num_threads": threads, "max_model_len": CONTEXT, "max_num_seqs": SEQUENCES}
    with LLM(model, skip_tokenizer_init=file is None, **options) as llm:

        def generate(prompts: list[list[int]], tokens: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

        _serve(generate)


@app.command()
def llamacpp(folder: Folder, bits: Bits = 16, threads: Threads = 1, file: File = None) -> None:
    """Its server within this process, whose scheduler batches the sequences."""
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file or folder / f"{BITS[bits]}.gguf")
    params.n_parallel, params.n_ctx, params.warmup, params.verbosity = SEQUENCES, SEQUENCES * CONTEXT, True, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(SEQUENCES)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        def one(prompt: list[int]) -> None:
            body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
            answer = server.handle_completions(body)
            assert answer["usage"]["completion_tokens"] == tokens, answer

        list(pool.map(one, prompts))

    _serve(generate)


@app.command()
def transformers(folder: Folder, bits: Bits = 16, threads: Threads = 1, file: File = None) -> None:
    """A file in float32, dequantised, and the hybrid in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    if file is not None:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    elif bits == 16:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        raise typer.BadParameter("transformers runs the hybrid in 16 bits", param_hint="--bits")

    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)

    _serve(generate)


if __name__ == "__main__":
    app()
