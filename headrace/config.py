"""Arguments as a user gives them (EngineArgs) and the configuration they resolve to (EngineConfig). Both are frozen.

``headrace.resolve`` turns the first into the second, and says why.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import msgspec

from headrace import choices
from headrace.errors import ConfigError
from headrace.model_spec import BLOCK_SPARSE, AnySpec, Arena, CacheGroup, StateGroup, block_sizes
from headrace.option_groups import MAX_SECONDS, KVEventsConfig, MediaCounts, StructuredOutputsConfig, WeightTransferConfig
from headrace.options import (
    CACHE,
    DEBUGGING,
    INT32_MAX,
    INT64_MAX,
    LIMITS,
    MEDIA,
    MODEL,
    SCHEDULING,
    Checked,
    OptionSpec,
    from_environment,
    is_declared,
    options,
)
from headrace.outputs import ExpertLayers

MAX_NUM_SEQS = 65_536
_WHOLE_OUTPUTS_INTERVAL = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineArgs(Checked):
    """Everything a user may set about an engine. None means that headrace chooses, and the start-up report says why.

    Raises:
        ConfigError: a value is of another type or out of range; the error names the field.
    """

    panels = MappingProxyType(
        {
            "model": MODEL,
            "max_model_len": CACHE,
            "max_num_seqs": SCHEDULING,
            "limit_mm_per_prompt": MEDIA,
            "max_logprobs": LIMITS,
            "step_timeout": DEBUGGING,
        }
    )

    model: Annotated[str | None, OptionSpec(positional=True, default="the embedded SmolLM2-135M-Instruct", metavar="MODEL")] = (
        None
    )
    """Directory of a Hugging Face checkpoint, hub id such as Qwen/Qwen3-0.6B, of whose GGUF files REPO:Q4_K_M is one, or
    .gguf file."""
    device: choices.Device = "auto"
    """Device of the model: cpu, cuda, or auto (the first CUDA device if there is one, else the CPU)."""
    revision: Annotated[str | None, OptionSpec(default="the hub's main branch")] = None
    """Branch, tag or commit of a hub model. Pin a commit to keep results reproducible."""
    tokenizer: Annotated[str | None, OptionSpec(default="the model's own", metavar="PATH")] = None
    """Directory or hub id of a tokenizer that replaces the model's own."""
    skip_tokenizer_init: Annotated[bool, OptionSpec(flags=("--skip-tokenizer-init",))] = False
    """Load no tokenizer: prompts and outputs are token ids only. For benchmarks, or where another program tokenises."""
    generation_config: choices.GenerationConfig = "auto"
    """Values of sampling parameters that a request leaves out. auto takes those of the model's files (generation_config.json
    or GGUF metadata), and for the embedded model those of its model card. vllm takes the neutral ones of vLLM and OpenAI,
    temperature 1 and no filter, whatever the model says."""
    task: choices.Task = "auto"
    """Requests that the model answers. auto: all that its files and its heads allow; a decoder generates and embeds from one
    engine. generate, embed and score: these alone, and the start fails where the model cannot. score makes a reranker like
    Qwen3-Reranker of a model whose files do not say that it is one."""
    model_impl: choices.ModelImpl = "auto"
    """Model implementation. native: headrace's own. transformers: the library's model with its attention replaced by
    headrace's, so that paged KV, chunked prefill and prefix caching work. megatron: a distributed checkpoint of
    Megatron-core. auto: native if there is one, megatron for its checkpoints, else transformers; the start-up report gives
    the reason."""
    layers_to_patch: Annotated[list[int] | None, OptionSpec(min=0, max=INT32_MAX, default="all of them")] = None
    """Layers, from 0, whose attention is replaced by headrace's in a model of transformers or Megatron-core. All that attend
    must be named: one that keeps its own has no paged KV cache."""
    tool_call_parser: Annotated[str, OptionSpec(metavar="FORMAT")] = "auto"
    """Format of the model's tool calls, such as hermes, llama3_json or qwen3_coder. auto recognises it from the chat template,
    and is generic where there are no known markers: a system message shows the tools and says how to call them. none looks for
    no calls. The start-up report and headrace doctor say what was recognised."""
    reasoning_parser: Annotated[str, OptionSpec(metavar="FORMAT")] = "auto"
    """Format of the model's reasoning, such as deepseek_r1 or qwen3. auto recognises it from the chat template and the
    vocabulary; none leaves it in the content."""
    trust_remote_code: Annotated[bool, OptionSpec(flags=("--trust-remote-code",))] = False
    """Run Python code that comes with the checkpoint, if neither headrace nor transformers implements the model. The code
    has your permissions: read it first, and pin --revision."""
    load_format: choices.LoadFormat = "auto"
    """Format of the weights. auto detects it from the files. dummy creates random weights from the config alone, with the
    speed and memory of the real model."""
    dtype: choices.DType = "auto"
    """Number format of activations and of weights that are not quantised. float32 is exact and the slowest on most CPUs.
    auto takes the checkpoint's format where the device runs it well; the start-up report gives the reason."""
    quantization: choices.Quantization = "auto"
    """Weight quantisation. auto keeps quantised checkpoints as they are stored where a kernel multiplies them: GGUF files,
    integers, FP8 and MXFP4, and NVFP4 on GPUs. int8 and int4, and on GPUs fp8 (a scale for each output) and
    fp8_per_block (128 x 128), quantise a checkpoint while it loads and report the error. none is exact. Names of checkpoint
    formats (awq, gptq_marlin, compressed-tensors ...) mean auto, and are refused for a checkpoint of another."""
    quantization_ignore: choices.MatrixNames = ()
    """A matrix that stays in floats: its name in the checkpoint, components of it, or a regular expression after re:."""
    quantize_head: choices.HeadQuantization = "auto"
    """Quantisation of the output head. auto: on CPUs 8 bits with int8 and int4, as it is stored in a quantised checkpoint, or
    none. int4 is 8 bits on CPUs."""
    head_dtype: choices.HeadDType = "auto"
    """Number format of logits as the head's product gives them. float32: sums that are not rounded to --dtype, with no float32
    copy of the matrix, as trainers compute them. auto: the same on GPUs; on a CPU, an unquantised head of 16 bits rounds to
    its own format, which is faster."""
    tensor_parallel_size: Annotated[
        int, OptionSpec(min=1, max=64, flags=("--tensor-parallel-size", "-tp", "--tp"), metavar="INTEGER")
    ] = 1
    """Number of ranks that compute each step together: processes with a GPU each, or with a share of the CPU's threads. Each
    holds a part of every layer and of the KV cache. Native models only; the heads of every layer must divide among them.
    `headrace doctor` shows what a rank holds."""
    enable_expert_parallel: Annotated[bool, OptionSpec(flags=("--enable-expert-parallel",))] = False
    """Give each of several ranks whole experts of a mixture, also where it could hold a slice of every expert. Slices keep
    ranks equally busy; whole experts multiply larger matrices."""
    pipeline_parallel_size: Annotated[int, OptionSpec(min=1, flags=("--pipeline-parallel-size", "-pp"))] = 1
    """Number of stages that layers are dealt to. There is one: on one host ranks are faster (--tensor-parallel-size), and
    replicas have more throughput (--data-parallel-size)."""
    nnodes: Annotated[int, OptionSpec(min=1)] = 1
    """Number of hosts. There is one; replicas on several hosts are deployed with Ray (headrace.deploy)."""
    distributed_executor_backend: Literal["mp", "uni", "ray", "external_launcher"] = "mp"
    """Launcher of the ranks. mp: the engine, as processes of this host. uni: there is one rank. Others are refused: Ray deploys
    whole engines (headrace.deploy), and a trainer's processes hand over their model (LLM.from_megatron)."""
    disable_custom_all_reduce: Annotated[bool, OptionSpec(flags=("--disable-custom-all-reduce",))] = False
    """Leave all sums of several ranks on GPUs to NCCL. Otherwise small ones go through memory that the GPUs map of each other,
    if they can; the start-up report says so."""
    seed: Annotated[int, OptionSpec(min=0, max=INT64_MAX)] = 0
    """Seed for requests without a seed, and for dummy weights. Two engines with the same seed that get the same requests in
    the same order generate the same tokens."""
    num_threads: Annotated[int | None, OptionSpec(min=1, max=1024, default="the physical cores that it may use")] = None
    """CPU threads for the model's kernels, of all ranks together. More threads than physical cores are slower; use fewer where
    other programs share the machine."""
    max_model_len: Annotated[
        int | Literal["auto"] | None,
        OptionSpec(
            min=2, default="the model's context length, or what a KV cache of a given size holds of it", metavar="INTEGER|auto"
        ),
    ] = None
    """Maximum length of prompt plus output, in tokens. Lower it to save memory. auto takes the longest length that the KV
    cache holds, as does leaving it out beside --num-kv-blocks or --kv-cache-memory."""
    kv_cache_dtype: choices.KVCacheDType = "auto"
    """Number format of the KV cache. auto is that of --dtype. fp8_e4m3 stores a number in one byte, with a float32 scale
    for K and for V of each token and head: about twice as many tokens as bfloat16, with 3 mantissa bits. Needs a GPU of
    SM80 or newer; on a CPU only the slow reference backend reads it."""
    kv_cache_memory: Annotated[
        int | None,
        OptionSpec(min=1, size=True, default="up to 2GiB, within a quarter of the memory that is free beside the weights"),
    ] = None
    """Memory for the KV cache: 2GiB, 500MB, or bytes. More memory runs more or longer requests at once and keeps more
    prefixes for reuse."""
    gpu_memory_utilization: Annotated[float, OptionSpec(min=0.0, max=1.0, metavar="SHARE")] = 0.9
    """Fraction of GPU memory that the engine uses in total, from 0 to 1: weights, the activations of the largest step, and
    the rest for KV cache. Lower it where other programs use the GPU."""
    num_kv_blocks: Annotated[int | None, OptionSpec(min=1, default="as many as fit in --kv-cache-memory")] = None
    """Number of KV blocks to allocate, in place of --kv-cache-memory. A block holds --block-size tokens of every layer. For
    tests and reproducible runs."""
    block_size: Annotated[int, OptionSpec(min=1, max=1024)] = 16
    """Tokens in a KV block. Smaller blocks waste less at the end of a sequence and share prefixes at a finer grain; larger
    blocks cost less bookkeeping."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished requests and reuse it for prompts with the same prefix. Does not change results. Turn it off
    to measure prefill speed."""
    state_dtype: choices.StateDType = "float32"
    """Dtype of the states of layers that carry one from token to token, such as Mamba's. bfloat16 halves them, and rounds them
    at every token."""
    state_snapshot_bytes: Annotated[int | None, OptionSpec(min=0, size=True, default="30% of the KV cache")] = None
    """Memory within the KV cache for snapshots of states, by which a model with state layers finds prefixes again: 2GiB,
    500MB, or bytes. 0 takes none."""
    max_num_seqs: Annotated[int | None, OptionSpec(min=1, max=MAX_NUM_SEQS, default="64 on a CPU, 256 on a GPU")] = None
    """Maximum number of sequences that run at once. A higher value raises throughput and the time between tokens."""
    max_num_batched_tokens: Annotated[int | None, OptionSpec(min=1, default="2048 on a CPU, 16384 on a GPU")] = None
    """Maximum number of tokens computed in one step, over all sequences; longer prompts are split into chunks. A smaller
    value keeps the time between tokens even while prompts arrive; a larger one finishes prompts sooner."""
    max_prefill_tokens_beside_decode: Annotated[
        int | None, OptionSpec(min=1, default="32 for each thread of a server on a CPU, else no limit")
    ] = None
    """Maximum number of prompt tokens computed in one step while other sequences generate. A smaller value shortens the pause
    between their tokens when a long prompt arrives, which then takes more steps."""
    max_step_seconds: Annotated[float | None, OptionSpec(min=0.0, max=MAX_SECONDS, metavar="SECONDS", default="1 or 0")] = None
    """Seconds that a step with prompt tokens is to take: chunks follow the measured speed, down to 16 tokens; some pictures and
    blocks of sparse prompts are computed whole. 0: any time, as it is on a GPU and in the offline API unless it is set."""
    max_queue_len: Annotated[int, OptionSpec(min=1)] = 4096
    """Maximum number of waiting sequences. Further requests are refused at once with HTTP 429."""
    policy: choices.Policy = "fcfs"
    """Order of waiting requests. fcfs: first come, first served. priority: the lowest `priority` field of the request
    first, then first come, first served."""
    data_parallel_size: Annotated[int, OptionSpec(min=1, max=1024, flags=("--data-parallel-size", "-dp"))] = 1
    """Number of replicas of the engine behind one server, each a process with a model and a cache of its own: replica i runs
    on CUDA device i. On a CPU they share the cores and the memory, so that more than one rarely pays."""
    data_parallel_size_local: Annotated[int | None, OptionSpec(min=1, max=1024, default="all of them")] = None
    """Number of replicas on this host: all of them. On several hosts they are deployed with Ray (headrace.deploy)."""
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    """Launcher of the replicas. mp: the server, as processes of this host. Ray deploys them with headrace.deploy instead."""
    dp_routing_policy: choices.RoutingPolicy = "prefix"
    """Policy that chooses a request's replica. prefix: the lowest product of prompt tokens that it would have to compute,
    behind cached prefixes, and of sequences that it would run. least-tokens: the one that holds the fewest tokens. session:
    always the same for requests with the same X-Session-ID header, or `user` without it. round-robin and random: for
    comparisons."""
    dp_queue_timeout: Annotated[float | None, OptionSpec(above=0.0, max=MAX_SECONDS, default="none", metavar="SECONDS")] = None
    """Seconds that a request may wait until a replica has room for it; then it is refused with HTTP 429. Only with
    --data-parallel-size above 1."""
    enable_lora: Annotated[bool, OptionSpec(flags=("--enable-lora",))] = False
    """Serve LoRA adapters beside the model: each request names one or none. Native models only."""
    max_loras: Annotated[int, OptionSpec(min=1, max=1024)] = 4
    """Adapters that run at once, each in memory of the device that is allocated at the start. Requests for others wait."""
    max_cpu_loras: Annotated[int | None, OptionSpec(min=1, default="16, or --max-loras where that is more")] = None
    """Adapters that may be loaded, in the host's memory. Another one is refused until one is unloaded: none is ever evicted."""
    max_lora_rank: Annotated[int, OptionSpec(min=1, max=512)] = 16
    """Largest rank of an adapter, for which memory is allocated; lower ranks are padded."""
    lora_target_modules: Annotated[tuple[str, ...], OptionSpec(min=1, default="all that the model has", metavar="NAME")] = ()
    """Name of matrices that adapters may have, such as q_proj, to save memory. Repeatable. Adapters with others are refused."""
    weight_transfer_config: Annotated[WeightTransferConfig, OptionSpec(metavar="JSON", default="the fields' own")] = (
        WeightTransferConfig()
    )
    """JSON object that says how a trainer broadcasts new weights, such as {"backend": "gloo"}."""
    weight_timeout: Annotated[float, OptionSpec(above=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 600.0
    """Seconds in which a group of a trainer must come together, and in which each of its broadcasts must come."""
    weights_must_be_complete: Annotated[bool, OptionSpec(flags=("--weights-must-be-complete",))] = False
    """Refuse to finish an update of weights that lacks some. Without it, the answer names them, and they keep their values."""
    heal_from_sibling: Annotated[bool, OptionSpec(flags=("--heal-from-sibling",))] = False
    """Copy the weights of another replica to one that was started again, in place of waiting for the next update of all."""
    kv_events_config: Annotated[KVEventsConfig, OptionSpec(metavar="JSON", default="no events")] = KVEventsConfig()
    """JSON object that says how changes of the prefix cache are published, such as {"enable_kv_cache_events": true}."""
    attention_backend: Annotated[str, OptionSpec(metavar="NAME")] = "auto"
    """Attention kernels. auto chooses the fastest backend that supports each layer; the start-up report gives the reason.
    flashinfer uses FlashInfer for decode rows and CUDA graphs too. reference is slow, for comparisons."""
    sparse_prefill: choices.SparsePrefill = "auto"
    """Attention of prompts. off: dense. xattn: each block of 128 queries attends to the blocks of keys that XAttention's
    estimate selects, without training, in any model. mean: to those with the highest-scoring mean keys, and to the mean of the
    others (FlashPrefill V2). auto: the model's router decides for each head, if the model has elastic attention (PawQwen3,
    PawLlama); else dense. A request may turn it off. Generated tokens always attend densely."""
    sparse_threshold: Annotated[
        float | None, OptionSpec(above=0.0, max=1.0, default="the checkpoint's, else 0.9; 0.1 for mean", metavar="NUMBER")
    ] = None
    """Threshold of the selector. xattn: the share of a query block's estimated attention that the selected blocks reach; 1
    selects all of them. mean: blocks are selected if their score is at least this share of the best one's."""
    sparse_selection: choices.SparseSelection = "threshold"
    """Rule by which XAttention's estimate selects blocks. threshold: the largest ones, with the one that reaches the threshold.
    upstream: the rule of the code published with XAttention, which in a prompt's first chunk (all of it up to 16384 tokens)
    takes one more, for comparisons with it; prompts of different lengths then share no cached prefix."""
    sparse_min_tokens: Annotated[
        int | None, OptionSpec(min=0, default="8192 for xattn and mean, 0 for a model's own router", metavar="INTEGER")
    ] = None
    """Prompts with fewer tokens attend densely, unless a request asks for it: selecting blocks costs more there than it saves.
    With more than the context, all prompts are dense but those of requests with sparse_prefill true."""
    elastic_max_exact_tokens: Annotated[
        int | None, OptionSpec(min=256, default="the longest prompt, at most 131072", metavar="INTEGER")
    ] = None
    """Longest prompt that a model's router sees as a whole, as it was trained to. It is computed in one piece; beside other
    sequences, a few layers a step. A larger value takes more memory for activations, and a layer of a longer piece is a longer
    pause for the others. A longer prompt is routed in segments of about this length, each by its own last keys and the prompt's
    first; the report of a request says so."""
    yarn_factor: choices.YarnFactor = "checkpoint"
    """Factor of YaRN's rotary embedding. checkpoint: the config's `factor`. positions: max_position_embeddings divided by
    original_max_position_embeddings, as transformers up to 4.51 computes it, with which PawQwen3 models were trained."""
    pipeline_depth: Annotated[int | None, OptionSpec(min=1, max=8, default="1 on a CPU, 2 on a GPU")] = None
    """Maximum number of steps in flight. With 2, the host plans the next step while the device runs the current one, which
    pays off where the device is not the host's own cores."""
    stream_interval: Annotated[int, OptionSpec(min=1, max=4096)] = 1
    """Number of tokens of a sample that are sent together. The first token is sent at once, and the end sends what is left.
    More than 1 takes less of the host's time for each token, and streams move in larger steps."""
    enforce_eager: Annotated[bool, OptionSpec(flags=("--enforce-eager",))] = False
    """Launch each kernel separately, without CUDA graphs. Starts sooner and simplifies debugging; decoding is slower."""
    deterministic: Annotated[bool, OptionSpec(flags=("--deterministic",))] = False
    """Batch-invariant kernels: a request gets bitwise the same tokens and logprobs whatever else is in the batch, however
    its prompt is chunked, preempted or not, with or without a cached prefix. GPUs only; slower."""
    wait_for_kernels: Annotated[bool, OptionSpec(flags=("--wait-for-kernels",))] = False
    """Start serving only after FlashInfer's kernels are compiled, which takes about a minute the first time on a machine.
    Without this, headrace's own kernels run until then."""
    graph_capture_seconds: Annotated[
        float | None, OptionSpec(min=0.0, max=3600.0, default="0.5; 20 in Python's LLM", metavar="SECONDS")
    ] = None
    """Time limit for capturing CUDA graphs before the engine takes requests, in seconds, most useful sizes first, and one of
    each kind in any case. The others are captured while the engine is idle and when steps miss them; a step without a graph
    replays a larger one, if there is one, or launches its kernels one by one."""
    limit_mm_per_prompt: Annotated[
        MediaCounts, OptionSpec(metavar="JSON", default='{"image": 32, "video": 4, "audio": 32}')
    ] = MediaCounts()
    """Maximum number of pictures, videos and audio clips in a prompt of a multimodal model, as a JSON object such as
    {"image": 8}, or image=8; 0 refuses them."""
    mm_encoder: choices.MMEncoder = "auto"
    """Vision encoder of a multimodal model. auto loads it. none leaves it out, which saves its memory: prompts then bring
    features that were encoded elsewhere."""
    max_num_encoder_tokens: Annotated[
        int | None, OptionSpec(min=1, default="what a prompt or a step may have, at most 16384")
    ] = None
    """Maximum number of tokens whose pictures and videos are encoded in one step. A smaller value keeps the time between tokens
    even while pictures arrive; a picture or video with more tokens is refused."""
    mm_processor_cache_bytes: Annotated[int, OptionSpec(min=0, size=True, default="256MiB")] = 2**28
    """Memory for pictures and videos that were resized and normalised, which prompts with the same ones share."""
    mm_encoder_cache_bytes: Annotated[int, OptionSpec(min=0, size=True, default="256MiB")] = 2**28
    """Device memory for features of pictures and videos that no running prompt needs, kept for prompts with the same ones."""
    allowed_media_domains: Annotated[tuple[str, ...], OptionSpec(min=1, max=253, metavar="NAME", default="any")] = ()
    """Host name, such as images.example.com, from which media may be fetched; URLs and redirects with another name are refused.
    Repeatable. With it or without, connections are made to public addresses alone."""
    allowed_media_path: Annotated[
        str | None,
        OptionSpec(min=1, metavar="DIRECTORY", default="none", flags=("--allowed-media-path", "--allowed-local-media-path")),
    ] = None
    """Directory whose files clients may name by file:// URLs, with those in its subdirectories. Every client can read every
    picture and video in it."""
    media_timeout: Annotated[float, OptionSpec(above=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 10.0
    """Seconds in which a medium must be fetched from its URL, redirects included."""
    max_media_bytes: Annotated[int, OptionSpec(min=1, size=True, default="64MiB")] = 2**26
    """Maximum size of one picture or video as it is fetched, read or sent. What is sent within a request is bounded by the size
    of the request's body too."""
    max_media_bytes_in_flight: Annotated[int, OptionSpec(min=1, size=True, default="1GiB")] = 2**30
    """Maximum size of all media that are being fetched and decoded, with their pixels. A request whose own media exceed it is
    refused; requests with further media are refused with HTTP 429 meanwhile."""
    max_image_pixels: Annotated[int, OptionSpec(min=1, max=2**31 - 1, metavar="PIXELS")] = 50_000_000
    """Maximum number of pixels, width times height, of a picture or of a frame of a video. A larger one is refused before it is
    decoded: a file of a few kilobytes may hold gigabytes of pixels."""
    num_video_frames: Annotated[int, OptionSpec(min=1, max=65_536)] = 32
    """Frames taken of a video, evenly from the first to the last; all where it has no more. More of them show more of what
    moves, and take more tokens."""
    max_video_pixels: Annotated[int, OptionSpec(min=1, max=2**33, metavar="PIXELS")] = 100_000_000
    """Maximum number of pixels of the frames taken of a video together."""
    max_video_seconds: Annotated[float, OptionSpec(above=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 3600.0
    """Maximum length of a video."""
    media_decode_seconds: Annotated[float, OptionSpec(above=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 20.0
    """Processor time that decoding one picture or video may take. Raise it for long videos: all of their frames are decoded."""
    media_decode_memory: Annotated[int, OptionSpec(min=1, size=True, default="2GiB")] = 2**31
    """Memory that decoding one picture or video may take, in a separate process."""
    media_workers: Annotated[int | None, OptionSpec(min=1, max=256, default="half of the cores, at most 4")] = None
    """Processes that decode pictures and videos, and threads that resize and normalise them. They start with the first ones."""
    max_logprobs: Annotated[int, OptionSpec(min=-1)] = 20
    """Largest `logprobs` and `prompt_logprobs` of a request; -1: no limit. High values slow each step and enlarge responses."""
    logprobs_mode: choices.LogprobsMode = "raw_logprobs"
    """Log-probabilities of sampled tokens, for requests that do not say. raw_logprobs: those of the model's logits.
    processed_logprobs: those of the distribution that the token was sampled from, over the tokens that masks and filters keep;
    with temperature 0 it has one token. Those of prompts are always the model's."""
    enable_return_routed_experts: Annotated[bool, OptionSpec(flags=("--enable-return-routed-experts",))] = False
    """Record the experts that the routers of a mixture choose, for requests with return_routed_experts; requests to
    /inference/v1/generate have it unless they say false."""
    enable_return_routed_weights: Annotated[bool, OptionSpec(flags=("--enable-return-routed-weights",))] = False
    """Record the weights of these experts too, and add them to what these requests get."""
    max_bad_words_num: Annotated[int, OptionSpec(min=0)] = from_environment("HEADRACE_MAX_BAD_WORDS_NUM", 16)
    """Maximum number of `bad_words` in a request. Also set by HEADRACE_MAX_BAD_WORDS_NUM."""
    bad_words_max_len: Annotated[int, OptionSpec(min=1)] = from_environment("HEADRACE_BAD_WORDS_MAX_LEN", 8)
    """Maximum length of a bad word, in tokens. Also set by HEADRACE_BAD_WORDS_MAX_LEN."""
    max_stop_seqs_num: Annotated[int, OptionSpec(min=0)] = from_environment("HEADRACE_MAX_STOP_SEQS_NUM", 16)
    """Maximum number of `stop` strings in a request. Also set by HEADRACE_MAX_STOP_SEQS_NUM."""
    stop_seqs_max_len: Annotated[int, OptionSpec(min=1)] = from_environment("HEADRACE_STOP_SEQS_MAX_LEN", 1024)
    """Maximum length of a stop string, in characters. Also set by HEADRACE_STOP_SEQS_MAX_LEN."""
    max_stop_token_ids: Annotated[int, OptionSpec(min=0)] = 1024
    """Maximum number of `stop_token_ids` in a request."""
    max_allowed_token_ids: Annotated[int, OptionSpec(min=1)] = 65_536
    """Maximum number of `allowed_token_ids` in a request."""
    max_prompt_chars: Annotated[
        int | None, OptionSpec(min=1, default="16 for each token of the context, at least 1,048,576")
    ] = None
    """Maximum length, in characters, of a text that is tokenised: a prompt, a rendered conversation, the input of /tokenize. A
    longer one is refused before it is tokenised, which takes about a second and 150 MB for a million characters."""
    max_template_seconds: Annotated[float, OptionSpec(above=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 2.0
    """Processor time that rendering one conversation with the chat template may take. A template that loops is ended then, and
    the request is refused."""
    max_template_memory: Annotated[int, OptionSpec(min=1, size=True, default="512MiB")] = 2**29
    """Memory that rendering one conversation with the chat template may take. The prompt may have an eighth of it."""
    structured_outputs_config: Annotated[StructuredOutputsConfig, OptionSpec(metavar="JSON", default="the fields' own")] = (
        StructuredOutputsConfig()
    )
    """JSON object of settings and limits of structured output, such as {"disable_any_whitespace": true}."""
    grammar_backend: choices.GrammarBackend = "auto"
    """SGLang's name for the field `backend` of --structured-outputs-config."""
    step_timeout: Annotated[float, OptionSpec(above=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 120.0
    """Seconds without a finished step, while work is pending, after which an engine that hardly uses the processor is stuck:
    stack traces are logged, and it restarts. One thread may compute for ten times that long, with a GPU for that long."""
    start_timeout: Annotated[float, OptionSpec(above=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 120.0
    """Seconds in which an engine that starts neither reports progress nor uses the processor, after which it counts as stuck
    and is started again. The whole start may take longer."""
    quarantine_seconds: Annotated[float, OptionSpec(min=0.0, max=MAX_SECONDS, metavar="SECONDS")] = 600.0
    """Seconds for which a request that was in flight when the engine crashed is run alone if it comes again, and is refused
    if the engine then crashes again, so that a client that repeats it cannot end everyone's requests. 0: neither."""
    record_steps: Annotated[str | None, OptionSpec(metavar="FILE")] = None
    """Write every step plan to this file; where it exists, to FILE.1, FILE.2 and so on, so that a restarted engine keeps the
    record of the crash. A recording replays a run without its clients. A full disk ends the recording, not the engine."""

    def for_whole_outputs(self) -> EngineArgs:
        """Returns the arguments for callers that wait for whole outputs: keeping streams even must not cost them throughput."""
        limit, seconds = self.max_prefill_tokens_beside_decode or INT32_MAX, self.max_step_seconds or 0.0
        interval = max(self.stream_interval, _WHOLE_OUTPUTS_INTERVAL)
        return dataclasses.replace(
            self, max_prefill_tokens_beside_decode=limit, max_step_seconds=seconds, stream_interval=interval
        )

    def validate(self) -> None:
        for name, option in options(EngineArgs).items():
            if is_declared(option.type):
                object.__setattr__(self, name, option.from_json(getattr(self, name)))
        super().validate()
        # What vLLM's options could ask for and is not there: several hosts, stages, other launchers.
        taken: dict[str, tuple[object, ...]] = dict.fromkeys(("pipeline_parallel_size", "nnodes"), (1,))
        taken |= {"data_parallel_size_local": (self.data_parallel_size, None), "data_parallel_backend": ("mp",)}
        taken["distributed_executor_backend"] = ("mp", "uni") if self.tensor_parallel_size == 1 else ("mp",)
        for name, values in taken.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"{name} must be {values[0]}, not {value}. {options(EngineArgs)[name].help}", name)
        if self.data_parallel_size == 1 and self.dp_queue_timeout is not None:
            raise ConfigError(
                "dp_queue_timeout limits the wait for a replica, and there is one (data_parallel_size is 1), whose own queue "
                "has no time limit",
                "dp_queue_timeout",
            )
        if self.data_parallel_size == 1 and self.heal_from_sibling:
            raise ConfigError("there is no other replica (data_parallel_size is 1)", "heal_from_sibling")
        if self.kv_events_config.enabled and not self.enable_prefix_caching:
            raise ConfigError("there are no events without a prefix cache (enable_prefix_caching)", "kv_events_config")
        named = {self.grammar_backend, self.structured_outputs_config.backend} - {"auto"}
        if len(named) > 1:
            raise ConfigError(
                f"grammar_backend and the backend of structured_outputs_config differ: {' and '.join(sorted(named))}",
                "grammar_backend",
            )


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """One thing headrace chose at start-up, and why."""

    name: str
    value: str
    reason: str


class MemoryLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of the memory ledger."""

    name: str
    nbytes: int
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """``nbytes`` are shared by all groups: ``arena`` says how. Block 0 of each group is the null block and holds no data."""

    block_size: int
    groups: tuple[CacheGroup, ...]
    nbytes: int
    enable_prefix_caching: bool
    dtype: str
    """Dtype of the numbers in the cache: the model's, or fp8_e4m3."""
    states: StateGroup | None = None
    """Blocks of the state layers, which are the arena's last group; None: the model has none."""
    state_snapshot_bytes: int = 0
    """Bytes that state blocks which no sequence owns may take."""
    state_grid: int = 0
    """Chunks of prompts and snapshots of states end at multiples of this number of tokens."""

    @cached_property
    def arena(self) -> Arena:
        state_bytes = 0 if self.states is None else self.states.block_bytes
        return Arena(self.nbytes, block_sizes(self.groups, self.block_size, state_bytes))

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Number of blocks per group of the arena: block numbers are below it."""
        return self.arena.num_blocks

    @property
    def shared(self) -> bool:
        """Whether several groups share the arena, so that blocks may move."""
        return len(self.arena.block_bytes) > 1

    @property
    def mixed(self) -> bool:
        """Whether the bytes of a new KV block may have held states of another dtype, and so may read as NaN."""
        return self.states is not None and any(plane.dtype != self.dtype for layer in self.states.planes for plane in layer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """Parameters of a selector. Each selector declares its fields in a subclass (``headrace/attention/selectors``)."""

    name: ClassVar[str]
    """Name in ``sparse_prefill``, in reports and in recordings."""
    threshold: float
    """A share; the selector says of what."""

    @property
    def by_length(self) -> bool:
        """Whether the length of the prompt has a part in what is selected, so that prompts of other lengths share no KV."""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Parameters of sparse prefill attention."""

    selector: SelectorConfig
    """Selects the key blocks of heads that attend to selected blocks."""
    types: tuple[int, int] | None
    """Types of heads that the model's router answers 0 and 1; None: no router, every head selects blocks."""
    heads: tuple[int, ...]
    """Query heads of each layer that can attend sparsely; 0: the layer is dense."""
    min_tokens: int
    """Shorter prompts are dense, unless a request asks for it."""
    max_exact_tokens: int
    """The longest segment that the router sees at once, and that is computed in one piece; 0: no router."""
    block: int
    sink_blocks: int
    local_blocks: int

    @property
    def routed(self) -> bool:
        return self.types is not None

    @property
    def selects(self) -> bool:
        """Whether any head may attend to selected blocks."""
        return self.types is None or BLOCK_SPARSE in self.types

    @property
    def name(self) -> str:
        """Everything here that KV depends on."""
        return repr(dataclasses.replace(self, min_tokens=0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_len: int
    policy: choices.Policy
    pipeline_depth: int
    max_prefill_tokens_beside_decode: int | None = None
    max_step_seconds: float | None = None
    """None: no limit, as above."""
    max_num_encoder_tokens: int = 0
    """Encoder work of a step, in the unit of ``Item.encoder_tokens``; 0: the model has no encoder."""
    decode_tokens: int = 1
    """Most tokens of a decode row: the last known one, and drafts behind it."""
    sparse: SparseConfig | None = None
    """None: every prompt attends densely."""
    max_loras: int = 0
    """Most adapters of the sequences that run at once; 0: there are no adapters."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step."""
        if self.sparse is None:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens, min(self.sparse.max_exact_tokens, self.max_model_len))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything decided."""

    args: EngineArgs
    model: AnySpec
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: str
    dtype: str
    quantization: str
    """none, or a name of ``headrace.quant.registry``."""
    attention_backends: tuple[str, ...]
    """Name of the backend of each layer."""
    num_threads: int
    graph_rows: tuple[int, ...] = ()
    """Batch sizes of decode steps for which a CUDA graph may be captured, rising; empty: none."""
    graph_prompt_tokens: tuple[int, ...] = ()
    """Tokens of prompts, beside decode rows or without, for which one may be captured, rising; empty: none."""
    experts: ExpertLayers | None = None
    """Layers whose routers' choices are recorded; None: none are."""
    decisions: tuple[Decision, ...]

    @property
    def sparse(self) -> SparseConfig | None:
        """None: every prompt attends densely."""
        return self.scheduler.sparse
