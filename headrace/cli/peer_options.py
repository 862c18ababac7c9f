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
    "--disable-uvicorn-access-log": "--no-log-requests",
    "--uvicorn-log-level": "--log-level",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--shutdown-timeout": "--drain-timeout",
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
    "--enable-offline-docs": "/docs makes no request to another origin",
    "--enable-mm-embeds": "prompts may always bring features that were encoded elsewhere",
    "--no-disable-hybrid-kv-cache-manager": "layers of several kinds have groups of their own in the cache",
}
"""Flags without a value that say what is always so."""


_SHARED_REASONS: Mapping[str, str] = {
    "the server runs no code of its users": "--logits-processor-pattern --io-processor-plugin --tool-parser-plugin"
    " --reasoning-parser-plugin --worker-cls --worker-extension-cls --scheduler-cls --additional-config",
    "tools are run by the client": "--tool-server",
    "change config.json in a copy of the checkpoint": "--hf-config-path --config-format --rope-scaling --rope-theta"
    " --disable-sliding-window --override-attention-dtype --override-neuron-config --json-model-override-args",
    "code of a checkpoint has the model's --revision": "--code-revision",
    "how a model pools follows from its files": "--convert --pooler-config --override-pooler-config",
    "a prompt is text or token ids": "--enable-prompt-embeds --enable-prompt-adapter",
    "there is one loader, for safetensors and GGUF files": "--safetensors-load-strategy --model-loader-extra-config"
    " --ignore-patterns --pt-load-map-location --max-parallel-loading-workers",
    "a terminal always shows the progress of loading": "--no-use-tqdm-on-load",
    "one host serves; Ray Serve has replicas on several": "--headless --master-addr --master-port"
    " --node-rank --data-parallel-rank --data-parallel-start-rank"
    " --data-parallel-address --data-parallel-rpc-port --data-parallel-hybrid-lb --data-parallel-external-lb"
    " --data-parallel-supervisor-port --ray-workers-use-nsight",
    "ranks divide heads, not contexts: --tensor-parallel-size": "--decode-context-parallel-size"
    " --prefill-context-parallel-size --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size",
    "ranks add up what their experts give, and tokens stay where they are": "--all2all-backend --enable-dbo --ubatch-size"
    " --dbo-decode-token-threshold --dbo-prefill-token-threshold --enable-eplb"
    " --eplb-config --expert-placement-strategy --num-redundant-experts --disable-nccl-for-dp-synchronization",
    "each rank has the whole encoder": "--enable-multimodal-encoder-data-parallel --mm-encoder-tp-mode",
    "kernels follow from the model and the device; --attention-backend is a choice": "--attention-config --kernel-config"
    " --moe-backend --mm-encoder-attn-backend --disable-cascade-attn",
    "write --mm-processor-cache-bytes": "--mm-processor-cache-gb --disable-mm-preprocessor-cache --mm-processor-cache-type"
    " --mm-shm-cache-max-object-size-mb",
    "write --mm-encoder none": "--language-model-only",
    "headrace encode writes features, which prompts may bring": "--mm-encoder-only --ec-transfer-config",
    "write --num-video-frames and --max-image-pixels": "--media-io-kwargs --video-pruning-rate",
    "write --max-num-encoder-tokens, which bounds a step": "--skip-mm-profiling",
    "a scale for each token is computed as it is written": "--calculate-kv-scales",
    "adapters change the language model's matrices alone": "--enable-lora-bias --lora-extra-vocab-size"
    " --enable-tower-connector-lora",
    "a request names its adapter": "--default-mm-loras",
    "kernels for adapters are of one kind": "--specialize-active-lora",
    "nothing is exported; /v1/explain/ID has the times of an answer": "--otlp-traces-endpoint --collect-detailed-traces",
    "/metrics has all that is measured": "--kv-cache-metrics --kv-cache-metrics-sample --cudagraph-metrics"
    " --enable-mfu-metrics --enable-logging-iteration-details --aggregate-engine-logging --enable-server-load-tracking"
    " --show-hidden-metrics-for-version",
    "a profiler starts the command, or attaches to it": "--profiler-config --enable-layerwise-nvtx-tracing",
    "any number of prompts may be in chunks; --max-num-batched-tokens bounds a step": "--max-num-partial-prefills"
    " --max-long-partial-prefills",
    "write --pipeline-depth, the steps that are under way at once": "--num-scheduler-steps --num-lookahead-slots"
    " --disable-async-output-proc",
    "a prompt begins as soon as it has room": "--scheduler-delay-factor",
    "layers of several kinds always have groups of their own in the cache": "--disable-hybrid-kv-cache-manager",
    "prompts and outputs are never logged": "--max-log-len --enable-log-outputs --enable-log-deltas",
    "write --log-level and --no-log-requests": "--log-config-file --log-error-stack --disable-access-log-for-endpoints",
    "the role of an answer is assistant": "--response-role",
    "a request says return_tokens_as_token_ids": "--return-tokens-as-token-ids",
    "a request says stream_options.include_usage": "--enable-force-include-usage",
    "the template says what content it takes": "--chat-template-content-format",
    "routes are not chosen one by one; a proxy in front can": "--tokens-only --disable-fastapi-docs"
    " --enable-tokenizer-info-endpoint",
    "system_fingerprint is that of the model and its settings": "--fingerprint-mode --fingerprint-value",
    "--cors-origin allows the methods and headers of the API": "--allowed-methods --allowed-headers",
    "write --tls-cert and --tls-key; a proxy in front can do more": "--enable-ssl-refresh --ssl-cert-reqs --ssl-ciphers",
    "write --max-header-bytes": "--h11-max-incomplete-event-size --h11-max-header-count",
    "blocks are found by one cryptographic hash": "--prefix-caching-hash-algo",
    "the parts of a message are always in their order": "--interleave-mm-strings",
    "a medium is cut where its tokens do not see later ones": "--disable-chunked-mm-input",
    "requests are read beside the engine's process, always": "--disable-frontend-multiprocessing",
    "write --max-num-batched-tokens, which counts the generated tokens of a step too": "--chunked-prefill-size"
    " --max-prefill-tokens",
    "weights stay on one device; --quantization makes them smaller": "--cpu-offload-gb --cpu-offload-params",
    "there is no draft model": "--speculative-config --speculative-algorithm",
    "the whole model runs on one device: choose it with --device": "--n-gpu-layers -ngl",
    "there is nothing to compile; --graph-capture-seconds and --enforce-eager are about CUDA graphs": "--compilation-config -O"
    " --optimization-level",
    "sizes follow from --max-num-seqs; --graph-capture-seconds bounds the time": "--cudagraph-capture-sizes"
    " --max-cudagraph-capture-size --cuda-graph-sizes",
    "a request says chat_template_kwargs": "--chat-template-kwargs --default-chat-template-kwargs",
    "KV and snapshots of states stay on the device; what is evicted is computed again": "--kv-offloading-backend"
    " --kv-offloading-size --enable-hierarchical-cache",
    "write --state-dtype": "--mamba-ssm-cache-dtype --mamba-ssm-dtype",
    "snapshots are at turns, ends of prompts and branches; --state-snapshot-bytes bounds them": "--mamba-cache-mode"
    " --mamba-block-size",
}

REFUSED: Mapping[str, str] = {flag: reason for reason, names in _SHARED_REASONS.items() for flag in names.split()} | {
    "--no-enable-chunked-prefill": "prompts are always computed in chunks; --max-num-batched-tokens bounds a chunk",
    "--long-prefill-token-threshold": "write --max-prefill-tokens-beside-decode",
    "--swap-space": "a preempted sequence is computed again, from cached blocks of its prefix; nothing is swapped",
    "--preemption-mode": "a preempted sequence is always computed again",
    "--ssl-ca-certs": "clients are known by --api-key; a proxy in front can ask for their certificates",
    "--root-path": "the proxy that adds a path removes it before it passes a request on",
    "--middleware": "the server runs no code of its users; a proxy in front can",
    "--max-loras-per-batch": "write --max-loras",
    "--max-loaded-loras": "write --max-cpu-loras",
    "--lora-dtype": "adapters have the model's --dtype",
    "--fully-sharded-loras": "each rank has the part of an adapter that its matrices need",
    "--lora-eviction-policy": "a loaded adapter is never evicted; on the device, the one unused for longest makes room",
    "--lora-backend": "there is one set of kernels for adapters",
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
    "--runner": "leave it out: a decoder generates and embeds from one engine; --task embed or --task score serves these alone",
    "--is-embedding": "write --task embed",
    "--performance-mode": "write --max-num-batched-tokens and --max-num-seqs",
    "--max-seq-len-to-capture": "graphs are for any context",
    "--mm-processor-kwargs": "a request says mm_processor_kwargs",
    "--kv-transfer-config": "the KV cache stays with its engine",
    "--mamba-cache-dtype": "a convolution's inputs are kept in the model's --dtype; --state-dtype is that of the states",
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
