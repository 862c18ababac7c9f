"""The engine's options: one a field of EngineArgs."""

from __future__ import annotations

from headrace.cli.options import CACHE, DEBUGGING, LIMITS, MODEL, SCHEDULING, Group, Knob, int_or_auto, positive_int
from headrace.cli.units import parse_size
from headrace.config import EngineArgs

_MODEL_KNOBS = (
    Knob(
        "model",
        MODEL,
        "A directory with a Hugging Face checkpoint, a hub id such as Qwen/Qwen3-0.6B, or a .gguf file.",
        positional=True,
        default="the embedded SmolLM2-135M-Instruct",
        metavar="MODEL",
    ),
    Knob(
        "device",
        MODEL,
        "Where the model runs: cpu, cuda, or auto: the first CUDA device if there is one, else the CPU.",
    ),
    Knob(
        "revision",
        MODEL,
        "Branch, tag or commit of a hub model. Pin a commit where results must not change under you.",
        default="the hub's main branch",
    ),
    Knob(
        "tokenizer",
        MODEL,
        "Directory or hub id of a tokenizer to use in place of the model's own.",
        default="the model's own",
        metavar="PATH",
    ),
    Knob(
        "skip_tokenizer_init",
        MODEL,
        "Work with token ids alone: no text comes in or goes out, and no tokenizer is loaded. For benchmarks, or where "
        "another program owns the tokenizer.",
        flags=("--skip-tokenizer-init",),
    ),
    Knob(
        "model_impl",
        MODEL,
        "Whose code the model is. native is headrace's own; transformers runs the library's model with its attention replaced "
        "by headrace's, so that paged KV, chunked prompts and prefix caching work for models nobody ported; auto takes native "
        "where there is one, else transformers, and the start-up says which and why. megatron loads a distributed checkpoint "
        "of Megatron-core, which auto does by itself.",
    ),
    Knob(
        "trust_remote_code",
        MODEL,
        "Run Python code that comes with the checkpoint, where neither headrace nor transformers has the model. It can do "
        "anything you can do: read it first, and pin --revision.",
        flags=("--trust-remote-code",),
    ),
    Knob(
        "load_format",
        MODEL,
        "How the weights are stored. auto looks at the files. dummy makes random weights from the config alone: speed and "
        "memory as the real model's, text without meaning.",
    ),
    Knob(
        "dtype",
        MODEL,
        "Number format of activations and of weights that are not quantised. float32 is exact and, on most CPUs, the slowest; "
        "auto takes the checkpoint's own where the device runs it well. The start-up says what was chosen and why.",
    ),
    Knob(
        "quantization",
        MODEL,
        "Weights in fewer bits. auto keeps a quantised GGUF quantised where a packed CPU kernel fits it, and leaves other "
        "checkpoints as they are; int8 and int4 quantise any checkpoint while it loads and report the error made. Set none "
        "for results that are exact.",
    ),
    Knob(
        "seed",
        MODEL,
        "Seeds the requests that bring no seed of their own, and dummy weights. Two engines with one seed, given the same "
        "requests in the same order, sample the same tokens.",
    ),
    Knob(
        "num_threads",
        MODEL,
        "CPU threads of the model's kernels. More than the physical cores slows them down; give fewer where other programs "
        "share the machine.",
        parser=positive_int,
        metavar="INTEGER",
        default="the physical cores that this process may use",
    ),
)

_CACHE_KNOBS = (
    Knob(
        "max_model_len",
        CACHE,
        "Longest prompt plus output, in tokens. Lower it to save memory; auto takes the longest that the KV cache holds.",
        parser=int_or_auto,
        metavar="INTEGER|auto",
        default="the model's context length",
    ),
    Knob(
        "kv_cache_dtype",
        CACHE,
        "Number format of the KV cache. auto is --dtype's. fp8_e4m3 keeps each number in one byte, with a scale for each token "
        "and head of K and of V: twice as many tokens as in bfloat16, rounded to 3 bits of mantissa. On a GPU (SM80 or newer) "
        "headrace's own attention kernel reads it; on a CPU only the reference does, slowly.",
    ),
    Knob(
        "kv_cache_memory",
        CACHE,
        "Memory for the KV cache: 2GiB, 500MB, or bytes. More lets more or longer requests run at once, and keeps more "
        "prefixes for reuse.",
        parser=parse_size,
        metavar="SIZE",
        default="up to 2GiB, within a quarter of the memory that is free beside the weights",
    ),
    Knob(
        "gpu_memory_utilization",
        CACHE,
        "Share of the GPU's memory that the engine takes in all, from 0 to 1: weights, what a step needs at its largest, and "
        "the rest for KV cache. Lower it where other programs use the GPU.",
        metavar="SHARE",
    ),
    Knob(
        "num_kv_blocks",
        CACHE,
        "KV blocks to allocate, in place of --kv-cache-memory. A block holds --block-size tokens of every layer. For tests "
        "and for runs that must repeat to the byte.",
        parser=positive_int,
        metavar="INTEGER",
        default="as many as fit in --kv-cache-memory",
    ),
    Knob(
        "block_size",
        CACHE,
        "Tokens a KV block. Smaller wastes less at the end of a sequence and shares prefixes more finely; larger costs less "
        "bookkeeping.",
        parser=positive_int,
        metavar="INTEGER",
    ),
    Knob(
        "enable_prefix_caching",
        CACHE,
        "Keep the KV of finished requests and reuse it for prompts that begin the same. Never changes a result. Turn it off "
        "to measure prompt processing.",
    ),
)

_SCHEDULING_KNOBS = (
    Knob(
        "max_num_seqs",
        SCHEDULING,
        "Sequences that run at once. More raises throughput and the time between the tokens of each.",
        parser=positive_int,
        metavar="INTEGER",
        default="64 on a CPU, 256 on a GPU",
    ),
    Knob(
        "max_num_batched_tokens",
        SCHEDULING,
        "Tokens computed in one step, over all sequences: longer prompts are cut into chunks of it. Smaller keeps the time "
        "between tokens even while prompts come in; larger finishes prompts sooner.",
        parser=positive_int,
        metavar="INTEGER",
        default="2048 on a CPU, 16384 on a GPU",
    ),
    Knob(
        "max_queue_len",
        SCHEDULING,
        "Requests that may wait. Beyond it new ones are refused at once (HTTP 429), so that clients can go elsewhere.",
        parser=positive_int,
        metavar="INTEGER",
    ),
    Knob(
        "policy",
        SCHEDULING,
        "Order of waiting requests: fcfs, first come first served; priority, lowest `priority` of the request first, and "
        "first come first served among equals.",
    ),
    Knob(
        "pipeline_depth",
        SCHEDULING,
        "Steps that may be launched before the first one's results are read. 2 lets the host plan the next step while the "
        "device still runs this one; worth it where the device does not run on the host's own cores.",
        parser=positive_int,
        metavar="INTEGER",
        default="1 on a CPU, 2 on a GPU",
    ),
    Knob(
        "enforce_eager",
        SCHEDULING,
        "Launch each kernel of a step by itself. Starts sooner and eases debugging; decoding is slower, because CUDA graphs "
        "launch a step as a whole.",
        flags=("--enforce-eager",),
    ),
    Knob(
        "deterministic",
        SCHEDULING,
        "Give a request bitwise the same tokens and logprobs whatever is served beside it, however its prompt is cut, and "
        "whether it was preempted or found a cached prefix: kernels that sum up in one order. For GPUs; slower.",
        flags=("--deterministic",),
    ),
    Knob(
        "wait_for_kernels",
        SCHEDULING,
        "Begin to serve only when FlashInfer's kernels are compiled, which takes about a minute the first time on a machine. "
        "Without it headrace's own kernels do their work until then.",
        flags=("--wait-for-kernels",),
    ),
    Knob(
        "graph_capture_seconds",
        SCHEDULING,
        "How long a start-up may capture CUDA graphs. Sizes that it did not come to are captured when they first come up.",
        metavar="SECONDS",
    ),
    Knob(
        "attention_backend",
        SCHEDULING,
        "Attention kernels: auto chooses for each layer the fastest that supports it, and the start-up says why; flashinfer "
        "has decode rows and CUDA graphs be FlashInfer's too; reference is slow and plain, for comparisons.",
        metavar="NAME",
    ),
)

_LIMIT_KNOBS = (
    Knob(
        "max_logprobs",
        LIMITS,
        "Most alternatives a request may ask for at each token (`logprobs`, `prompt_logprobs`). They cost time in every step "
        "and size in every answer.",
        metavar="INTEGER",
    ),
    Knob(
        "max_bad_words_num",
        LIMITS,
        "Most `bad_words` of one request. Also set by HEADRACE_MAX_BAD_WORDS_NUM.",
        metavar="INTEGER",
    ),
    Knob(
        "bad_words_max_len",
        LIMITS,
        "Longest bad word, in tokens. Also set by HEADRACE_BAD_WORDS_MAX_LEN.",
        metavar="INTEGER",
    ),
    Knob(
        "max_stop_seqs_num",
        LIMITS,
        "Most `stop` strings of one request. Also set by HEADRACE_MAX_STOP_SEQS_NUM.",
        metavar="INTEGER",
    ),
    Knob(
        "stop_seqs_max_len",
        LIMITS,
        "Longest stop string, in tokens. Also set by HEADRACE_STOP_SEQS_MAX_LEN.",
        metavar="INTEGER",
    ),
)

_DEBUG_KNOBS = (
    Knob(
        "step_timeout",
        DEBUGGING,
        "Seconds without a finished step, while work is pending, after which the engine counts as stuck: its stacks are "
        "logged and it is restarted. Raise it for very long prompts on a slow device.",
        metavar="SECONDS",
    ),
    Knob(
        "record_steps",
        DEBUGGING,
        "Write every step plan to this file. A recorded stream replays a run without its clients.",
        metavar="FILE",
    ),
)

ENGINE: Group[EngineArgs] = Group(EngineArgs, _MODEL_KNOBS + _CACHE_KNOBS + _SCHEDULING_KNOBS + _LIMIT_KNOBS + _DEBUG_KNOBS)
