"""Option names of vLLM, SGLang and llama.cpp's server: taken where they mean the same, refused with the reason elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from headrace.cli.errors import EXIT_USAGE, print_error

SAME: Mapping[str, str] = {
    "--tp-size": "--tensor-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--enable-fp32-lm-head": "--head-dtype=float32",
    "--lora-paths": "--lora-modules",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--page-size": "--block-size",
    "--random-seed": "--seed",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--scheduling-policy": "--policy",
    "--schedule-policy": "--policy",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-cuda-graph": "--enforce-eager",
    "--disable-log-requests": "--no-log-requests",
    "--no-enable-log-requests": "--no-log-requests",
    "--enable-log-requests": "--log-requests",
    "--uvicorn-log-level": "--log-level",
    "--ssl-keyfile": "--tls-key",
    "--ssl-certfile": "--tls-cert",
}
"""Name elsewhere -> name here, of the same meaning and values."""

ALWAYS: Mapping[str, str] = {
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--cont-batching": "sequences join and leave the batch at every step",
    "--enable-prompt-tokens-details": "every usage has prompt_tokens_details",
    "--enable-request-id-headers": "every answer has an X-Request-Id header",
    "--enable-metrics": "/metrics is always there",
    "--use-tqdm-on-load": "a terminal shows the progress of loading",
}
"""Flags without a value that say what is always so."""

_SPECULATION = "there is no draft model"
_LAYERS = "the whole model runs on one device: choose it with --device"

REFUSED: Mapping[str, str] = {
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; --max-num-batched-tokens bounds a chunk",
    "--chunked-prefill-size": "write --max-num-batched-tokens, which counts the generated tokens of a step too",
    "--max-prefill-tokens": "write --max-num-batched-tokens, which counts the generated tokens of a step too",
    "--long-prefill-token-threshold": "write --max-prefill-tokens-beside-decode",
    "--swap-space": "a preempted sequence is computed again, from cached blocks of its prefix; nothing is swapped",
    "--preemption-mode": "a preempted sequence is always computed again",
    "--cpu-offload-gb": "weights stay on one device; --quantization makes them smaller",
    "--ssl-ca-certs": "clients are known by --api-key; a proxy in front can ask for their certificates",
    "--root-path": "the proxy that adds a path removes it before it passes a request on",
    "--middleware": "the server runs no code of its users; a proxy in front can",
    "--max-loras-per-batch": "write --max-loras",
    "--max-loaded-loras": "write --max-cpu-loras",
    "--lora-dtype": "adapters have the model's --dtype",
    "--fully-sharded-loras": "each rank has the part of an adapter that its matrices need",
    "--lora-eviction-policy": "a loaded adapter is never evicted; on the device, the one unused for longest makes room",
    "--lora-backend": "there is one set of kernels for adapters",
    "--speculative-config": _SPECULATION,
    "--speculative-algorithm": _SPECULATION,
    "--n-gpu-layers": _LAYERS,
    "-ngl": _LAYERS,
    "--parallel": "write --max-num-seqs",
    "--mem-fraction-static": "write --gpu-memory-utilization, the share of the GPU that weights and cache take together",
    "--max-total-tokens": "write --num-kv-blocks, each of --block-size tokens, or --kv-cache-memory",
    "--allowed-origins": "write --cors-origin for each origin",
    "--allow-credentials": "write --cors-credentials",
    "--async-scheduling": "write --pipeline-depth 2, the default on a GPU",
    "--no-async-scheduling": "write --pipeline-depth 1",
    "--guided-decoding-backend": "write --grammar-backend; llguidance holds all constraints",
    "--override-generation-config": 'write "--generation-config vllm" for neutral defaults; requests say the rest',
    "--download-dir": "set the environment variable HF_HOME",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--tokenizer-mode": "the tokenizer is always the fast one",
    "--tokenizer-revision": "the tokenizer has the model's --revision; --tokenizer names another",
    "--hf-overrides": "change config.json in a copy of the checkpoint; a reranker needs no change",
    "--json-model-override-args": "change config.json in a copy of the checkpoint",
    "--runner": "leave it out: a decoder generates and embeds from one engine; --task embed or --task score serves these alone",
    "--is-embedding": "write --task embed",
    "--compilation-config": "there is nothing to compile; --graph-capture-seconds and --enforce-eager are about CUDA graphs",
    "--cuda-graph-sizes": "sizes follow from --max-num-seqs; --graph-capture-seconds bounds the time",
    "--max-seq-len-to-capture": "graphs are for any context",
    "--chat-template-kwargs": "a request says chat_template_kwargs",
    "--default-chat-template-kwargs": "a request says chat_template_kwargs",
    "--mm-processor-kwargs": "a request says mm_processor_kwargs",
    "--kv-transfer-config": "the KV cache stays with its engine",
    "--kv-offloading-size": "KV and snapshots of states stay on the device; what is evicted is computed again",
    "--enable-hierarchical-cache": "KV and snapshots of states stay on the device; what is evicted is computed again",
    "--mamba-ssm-cache-dtype": "write --state-dtype",
    "--mamba-ssm-dtype": "write --state-dtype",
    "--mamba-cache-dtype": "a convolution's inputs are kept in the model's --dtype; --state-dtype is that of the states",
    "--mamba-block-size": "snapshots are at turns, ends of prompts and branches; --state-snapshot-bytes bounds them",
    "--mamba-full-memory-ratio": "states and KV share the cache without a ratio; --state-snapshot-bytes bounds snapshots",
    "--api-server-count": "one server process feeds all replicas",
    "--enable-sleep-mode": "write --enable-rl-api, which has /sleep and /wake_up",
    "--return-sampling-mask": "a request says return_sampling_mask in sampling_params of /inference/v1/generate",
    "--logits-processors": "the server runs no code of its users; in Python, sampling features are registered",
    "--disable-log-stats": "no statistics are logged; /metrics has them",
}
"""Option elsewhere -> why it is not taken, or what to write here."""


_MODEL = ("--model", "--model-path")
"""MODEL as an option; of commands whose argument it is."""
SEVERAL_MODELS = "a command serves one MODEL; --models-config FILE serves several, each with its own options"


def translated(args: list[str], known: set[str]) -> list[str]:
    """Returns the arguments with the names of the ``known`` flags.

    Raises:
        typer.Exit: an option is not taken; the reason is printed.
    """
    own, end, rest = _partition(args)
    found = []
    words = iter(own)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in _MODEL and "--model" not in known:
            found.append(value if equals else next(words, word))
        elif flag in known or not flag.startswith("-"):
            found.append(word)
        elif flag in ALWAYS:
            if equals:
                print_error(f"{flag} takes no value: {ALWAYS[flag]}")
                raise typer.Exit(EXIT_USAGE)
        elif flag in REFUSED:
            print_error(f"{flag}: {REFUSED[flag]}")
            raise typer.Exit(EXIT_USAGE)
        else:
            here = SAME.get(flag)
            found.append(here + equals + value if here is not None and here.partition("=")[0] in known else word)
    return [*found, *end, *rest]


def _partition(args: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The arguments before, at and after ``--``."""
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at : at + 1], args[at + 1 :]
