"""Tiny random models behind the real scheduler and runner, and one loop that drives them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headrace.config import EngineArgs, EngineConfig, SchedulerConfig
from headrace.core.media import ItemInputs
from headrace.core.plan import SamplePlan, StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import SequenceUpdate
from headrace.model_spec import (
    AttentionSpec,
    BlockSpec,
    ConvSpec,
    DenseSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    StateGroup,
    StateSpec,
    VisionSpec,
    cache_groups,
)
from headrace.model_spec.kv import FP8_KV
from headrace.models.decoder import Decoder
from headrace.models.families.gemma4 import Gemma4Spec
from headrace.models.families.llama4 import Llama4Spec
from headrace.models.registry import build
from headrace.models.vision.interface import EncodedItem, device_tensor
from headrace.outputs import Failure, TokenLogprobs
from headrace.runner.parts.media import MediaTables
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.text.bad_words import compile_bad_words
from headrace.text.vocab import TokenBytes
from support.cache_config import cache_holding

VOCAB = 160
EOS = 1
SPECIAL = frozenset({0, EOS, 2})
MAX_LEN = 96
BLOCK = 4
STATE_GRID = 8


def _layer(
    index: int, window: int | None = None, heads: int = 4, kv_heads: int = 2, dim: int = 8, v_dim: int = 8, **changes: Any
) -> AttentionSpec:
    return AttentionSpec(
        layer=index,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        scale=dim**-0.5,
        rotary_dim=dim,
        rope=RopeSpec(10000.0),
        window=window,
        **changes,
    )


def _spec(layers: Sequence[AttentionSpec], kind: type[ModelSpec] = ModelSpec, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "layers": tuple(layers),
        "mlps": (DenseSpec(48),) * len(layers),
        "norm_eps": 1e-5,
        "max_position": 4 * MAX_LEN,
    }
    return kind(**fields | changes)


_CONV = ConvSpec(3, (("x", 32),), bias=False, activation=None)
_MIXED = ConvSpec(4, (("q", 16), ("k", 16), ("v", 48)), bias=False, activation="silu")
FAMILIES: dict[str, ModelSpec] = {
    "llama": _spec([_layer(i) for i in range(2)]),
    "qwen2": _spec([_layer(i) for i in range(2)], attention_bias=True),
    "qwen3": _spec([_layer(i, dim=12, v_dim=12) for i in range(2)], qk_norm=True, tie_word_embeddings=True),
    "mistral": _spec([_layer(i, window=9) for i in range(2)]),
    "windows between": _spec([_layer(0), _layer(1, window=6), _layer(2, window=11)]),
    "uneven": _spec([_layer(0, kv_heads=4, dim=8, v_dim=4), _layer(1, kv_heads=1, dim=8, v_dim=12, window=7)]),
    "gemma 4 of text": _spec(
        [
            _layer(0, window=7),
            _layer(1, kv_heads=1, dim=12, v_dim=12, v_from_k=True),
            _layer(2, window=7),
            _layer(3, window=7, kv_source=2),
            _layer(4, kv_heads=1, dim=12, v_dim=12, kv_source=1),
        ],
        Gemma4Spec,
        architecture="Gemma4ForCausalLM",
        qk_norm=True,
        logit_soft_cap=20.0,
        token_width=6,
        token_vocab_size=VOCAB,
        token_act="gelu_pytorch_tanh",
    ),
    "three sizes": _spec(
        [_layer(0, kv_heads=1), _layer(1, window=6, kv_heads=4), _layer(2, window=6), _layer(3, window=17, dim=12, v_dim=20)]
    ),
    "chunks": _spec(
        [_layer(0, window=10, chunked=True), dataclasses.replace(_layer(1), rotary_dim=0, rope=None)],
        Llama4Spec,
        architecture="Llama4ForCausalLM",
        mlps=(
            MoeSpec(num_experts=4, top_k=1, intermediate_size=12, scoring="sigmoid", normalize=False, shared=DenseSpec(16)),
            DenseSpec(48),
        ),
        unit_qk=True,
        growth=(8, 0.1),
    ),
    "short convolutions": _spec(
        [_layer(0), _layer(1, window=9, kv_heads=1)],
        architecture="Lfm2ForCausalLM",
        mlps=(DenseSpec(48),) * 4,
        states=tuple(StateSpec(index, "conv", 0, 0, 0, 0, _CONV) for index in range(2)),
        mixers=(BlockSpec(state=0), BlockSpec(attention=0), BlockSpec(state=1), BlockSpec(attention=1)),
        qk_norm=True,
    ),
    "delta rule": _spec(
        [_layer(0, output_gate=True)],
        architecture="Qwen3_5ForCausalLM",
        mlps=(DenseSpec(48),) * 3,
        states=tuple(StateSpec(index, "gdn", 4, 2, 8, 12, _MIXED) for index in range(2)),
        mixers=(BlockSpec(state=0), BlockSpec(attention=0), BlockSpec(state=1)),
        qk_norm=True,
    ),
}
"""Geometries of a layer: heterogeneous models stand in the same list as the plain ones."""
IN_FP8 = ", KV in FP8"
FAMILIES |= {
    "one layer" + IN_FP8: _spec([_layer(0, heads=3, kv_heads=1, v_dim=12)], qk_norm=True),
    "windows" + IN_FP8: _spec(
        [
            _layer(0, window=9, heads=1, kv_heads=1, dim=12),
            _layer(1, heads=2, v_dim=20),
            _layer(2, heads=2, kv_source=1, v_dim=20),
        ]
    ),
}
"""Few heads: on the CPU it is the oracle that attends, a head at a time."""
_EXPERTS = MoeSpec(num_experts=4, top_k=2, intermediate_size=12, correction_bias=True)
_EXPERTS_OF_PICTURES = dataclasses.replace(_EXPERTS, intermediate_size=8)
_MROPE = RopeSpec(10000.0, sections=(1, 1, 2))
WITH_MEDIA: dict[str, ModelSpec] = {
    "positions in three sections": _spec(
        [dataclasses.replace(layer, rope=_MROPE) for layer in (_layer(0), _layer(1, window=9, kv_heads=1, v_dim=12))],
        vision=VisionSpec(model_type="of tests", deepstack_layers=1),
    ),
    "both ways": _spec(
        [_layer(0, window=6), _layer(1, kv_heads=1, dim=12, v_dim=8), _layer(2, window=6, kv_heads=4, v_dim=12)],
        vision=VisionSpec(model_type="of tests", bidirectional=True),
    ),
    "experts of pictures": _spec(
        [dataclasses.replace(_layer(i), rope=RopeSpec(10000.0, sections=(2, 1, 1), time_last=True)) for i in range(2)],
        architecture="Ernie4_5_VLMoeForConditionalGeneration",
        mlps=(DenseSpec(48), dataclasses.replace(_EXPERTS, shared=DenseSpec(16), vision=_EXPERTS_OF_PICTURES)),
        vision=VisionSpec(model_type="of tests", own_experts=True),
    ),
}
"""Models that read pictures: ``test_media_invariants``. Their layers differ in KV heads and widths."""
MEDIA_IN_FP8 = {name + IN_FP8: spec for name, spec in WITH_MEDIA.items()}
SPECS = FAMILIES | WITH_MEDIA | MEDIA_IN_FP8


class Encoder:
    """Squashes its input. Counts what it encodes."""

    nbytes = 0

    def __init__(self, device: str) -> None:
        self.num_encoded = 0
        self._device = torch.device(device)

    def weights(self) -> list[torch.Tensor]:
        return []

    def encode(self, items: Sequence[ItemInputs]) -> list[EncodedItem]:
        self.num_encoded += len(items)
        pixels = [device_tensor(item.tensors["pixels"], self._device) for item in items]
        return [
            EncodedItem(each.tanh(), each.cos()[None] if "deep" in item.tensors else None)
            for each, item in zip(pixels, items, strict=True)
        ]


@functools.cache
def token_bytes() -> TokenBytes:
    """A text of few letters, so that words come to be in many ways; and a byte that is not a whole character."""
    letters = [bytes([byte]) for byte in b"abcd"]
    pieces = [b"<pad>", b"<eos>", b"<sep>", *letters, b"\xc3", b"\xa9", b""]
    for length in (2, 3, 4):
        pieces += [b"".join(parts) for parts in itertools.product(letters, repeat=length)]
    return TokenBytes(tuple(pieces[: VOCAB - 4]), SPECIAL)


def text_of(token_ids: Sequence[int]) -> bytes:
    """Without special tokens. The model has tokens that the tokenizer lacks."""
    visible = token_bytes().visible
    return b"".join(visible[token] for token in token_ids if token < len(visible))


def model(family: str, device: str = "cpu") -> Decoder:
    """One for all tests."""
    return _model(family, device)


@functools.cache
def _model(family: str, device: str) -> Decoder:
    """Random weights whose outputs wander instead of repeating themselves."""
    generator = torch.Generator().manual_seed(len(family))
    decoder = build(SPECS[family], "float32", "cpu")
    for name, parameter in decoder.named_parameters():
        if "norm" in name or name.endswith("layer_scalar"):
            parameter.data.uniform_(0.8, 1.2, generator=generator)
        else:
            width = parameter.shape[-1]
            parameter.data.normal_(0.0, 2.0 / math.sqrt(width), generator=generator)
    decoder.embed_tokens.weight.data.normal_(0.0, 1.0, generator=generator)
    if device == "cpu":
        return decoder
    elsewhere = build(SPECS[family], "float32", device)
    elsewhere.load_state_dict(decoder.state_dict())
    return elsewhere


@dataclasses.dataclass(frozen=True)
class World:
    """Size of an engine. The defaults are ample: nothing is chunked, preempted or shared."""

    family: str = "llama"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    num_blocks: int = 400
    caching: bool = False
    depth: int = 1
    decode_tokens: int = 1
    backend: str = "torch"
    device: str = "cpu"
    record: str | None = None

    def config(self) -> EngineConfig:
        spec = SPECS[self.family]
        in_fp8 = self.family.endswith(IN_FP8)
        kv_dtype = FP8_KV if in_fp8 else "float32"
        groups = cache_groups(spec.layers, kv_dtype)
        args = EngineArgs(record_steps=self.record)
        held, states, batched = [self.num_blocks - 1] * len(groups), None, self.max_num_batched_tokens
        if spec.states:
            states = StateGroup(tuple(state.planes("float32", "float32") for state in spec.states))
            held.append(self.num_blocks // 8)
            batched = max(batched, STATE_GRID + self.max_num_seqs)
        return EngineConfig(
            args=args,
            model=spec,
            cache=cache_holding(
                held,
                block_size=BLOCK,
                groups=groups,
                enable_prefix_caching=self.caching,
                dtype=kv_dtype,
                states=states,
                snapshots=self.num_blocks // 8,
                state_grid=STATE_GRID if states else 0,
            ),
            scheduler=SchedulerConfig(
                max_model_len=MAX_LEN,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=batched,
                max_queue_len=1000,
                policy="fcfs",
                pipeline_depth=self.depth,
                decode_tokens=self.decode_tokens,
                max_num_encoder_tokens=MAX_LEN if spec.vision is not None else 0,
            ),
            device=self.device,
            dtype="float32",
            quantization="none",
            attention_backends=("reference" if in_fp8 and self.backend == "torch" else self.backend,) * len(spec.layers),
            num_threads=1,
            decisions=(),
        )

    def runner(self) -> ModelRunner:
        encoder = Encoder(self.device) if SPECS[self.family].vision is not None else None
        return ModelRunner(model(self.family, self.device), self.config(), token_bytes(), encoder=encoder)


def request(name: str, prompt: Sequence[int], *, eos: Sequence[int] = (EOS,), seed: int = 7, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0} | sampling)
    table = None
    if params.bad_words:
        table = compile_bad_words(params.bad_words, token_bytes(), special_text=not params.skip_special_tokens)
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling=params,
        max_tokens=params.max_tokens or MAX_LEN,
        seed=seed,
        eos_token_ids=list(eos),
        bad_words=table,
    )


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@dataclasses.dataclass
class Outcome:
    """Result of one sample."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: Failure | None = None

    def take(self, update: SequenceUpdate) -> None:
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or []
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = update.finish_reason or self.finish_reason
        self.error = update.error or self.error


Outcomes = dict[str, list[Outcome]]
"""request_id -> its samples."""


class Engine:
    """Scheduler, runner, and what has come of the requests. ``before_step`` is called with the number of the next step."""

    def __init__(self, world: World, runner: ModelRunner | None = None) -> None:
        config = world.config()
        self.world = world
        self.runner = world.runner() if runner is None else runner
        self.scheduler = Scheduler(config.scheduler, config.cache)
        self.outcomes: Outcomes = {}
        self.results: list[StepResult] = []
        self._launched: deque[tuple[StepPlan, Any]] = deque()

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add(each)
            self.outcomes[each.request_id] = [Outcome() for _ in range(each.sampling.n)]

    def run(self, before_step: Callable[[int], None] = lambda step: None, arrivals: Sequence[Request] = ()) -> Outcomes:
        """Runs until nothing is left to do. One of ``arrivals`` is added before every step."""
        waiting = deque(arrivals)
        for step in itertools.count():
            if step > 5000:
                raise AssertionError("the work does not end")
            before_step(step)
            if waiting:
                self.add(waiting.popleft())
            elif not self.scheduler.has_work():
                break
            while (plan := self.scheduler.schedule()) is not None:
                step = self.runner.execute(plan)
                self.runner.sample(step, SamplePlan(plan.step))
                self._launched.append((plan, step))
            if self._launched:
                self._collect()
        self.scheduler.check_integrity()
        assert self.scheduler.stats().kv_blocks_used == 0
        return self.outcomes

    def _collect(self) -> None:
        plan, handle = self._launched.popleft()
        result = self.runner.collect(handle)
        assert result.seq_ids == [row.seq_id for row in plan.rows if row.num_logits], "a row that does not sample has no token"
        self.results.append(result)
        for update in self.scheduler.update(plan, result):
            self.outcomes[update.seq.request.request_id][update.seq.index].take(update)


def serve(world: World, requests: Sequence[Request], **options: Any) -> Outcomes:
    engine = Engine(world)
    engine.add(*requests)
    return engine.run(**options)


def alone(world: World, requests: Sequence[Request]) -> Outcomes:
    """Each request in a world of its own."""
    outcomes: Outcomes = {}
    for each in requests:
        outcomes |= serve(world, [each])
    return outcomes


def same(found: Outcomes, expected: Outcomes) -> None:
    """Tokens are equal, logprobs to float32's rounding."""
    assert found.keys() == expected.keys()
    for name, samples in expected.items():
        for index, (one, other) in enumerate(zip(found[name], samples, strict=True)):
            where = f"{name}[{index}]"
            assert (one.token_ids, one.finish_reason, one.error) == (other.token_ids, other.finish_reason, other.error), where
            same_logprobs(one.logprobs, other.logprobs, where)
            same_logprobs(one.prompt_logprobs or [], other.prompt_logprobs or [], where)


def same_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs], where: str) -> None:
    assert len(found) == len(expected), where
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.rank) == (other.token_ids, other.rank), where
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4), where


def media_of(runner: ModelRunner) -> MediaTables:
    """The runner's part for pictures and videos."""
    (media,) = (part for part in runner.parts if isinstance(part, MediaTables))
    return media
