"""Options that are groups: a JSON object on the command line, whose fields are declared as those of EngineArgs are."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

from headrace import choices
from headrace.errors import ConfigError
from headrace.options import INT32_MAX, Checked, OptionSpec

MAX_SECONDS = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig(Checked):
    """Options of structured output, and limits on one request; exceeding them is refused with the parameter's name.

    Raises:
        ConfigError: a value is of another type or out of range; the error names the field.
    """

    backend: choices.GrammarBackend = "auto"
    """Library that holds constraints. There is one, llguidance, and auto means it."""
    disable_any_whitespace: bool = False
    """Write JSON without whitespace between its tokens, unless the request says otherwise."""
    disable_additional_properties: bool = True
    """Allow no keys beside an object's `properties` where the schema does not say, unless the request says otherwise."""
    enable_in_reasoning: bool = False
    """Hold the output from its first token on, also of a model that reasons first. false: what follows the reasoning."""
    max_bytes: Annotated[int, OptionSpec(min=1, size=True)] = 2**20
    """Maximum length of a schema, regex, list of choices or grammar, in bytes."""
    max_depth: Annotated[int, OptionSpec(min=1, max=256)] = 64
    """Maximum nesting of a JSON Schema."""
    max_values: Annotated[int, OptionSpec(min=1)] = 20_000
    """Maximum number of properties, enum values and choices together."""
    max_grammar_size: Annotated[int, OptionSpec(min=1, max=2**31 - 1)] = 500_000
    """Maximum number of symbols of a compiled grammar."""
    max_lexer_states: Annotated[int, OptionSpec(min=1, max=2**31 - 1)] = 50_000
    """Maximum number of lexer states of one sequence; each takes 1 to 2 kB."""
    max_compile_seconds: Annotated[float, OptionSpec(min=0.01, max=MAX_SECONDS)] = 5.0
    """Maximum processor time to check and compile one constraint."""
    max_compile_memory: Annotated[int, OptionSpec(min=2**24, size=True)] = 2**29
    """Maximum memory to check and compile one constraint."""
    compile_threads: Annotated[int | None, OptionSpec(min=1, default="half of the cores, at most 4")] = None
    """Processes that check constraints in the server, and threads of the engine that compile them; for slow ones, one more."""
    cache_bytes: Annotated[int, OptionSpec(min=0, size=True)] = 2**28
    """Memory for compiled grammars, which requests with equal constraints share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaCounts(Checked):
    """Maximum numbers of media in a prompt of a multimodal model, by modality.

    Raises:
        ConfigError: a value is of another type or out of range; the error names the field.
    """

    image: Annotated[int, OptionSpec(min=0, max=INT32_MAX)] = 32
    """Maximum number of pictures in a prompt."""
    video: Annotated[int, OptionSpec(min=0, max=INT32_MAX)] = 4
    """Maximum number of videos in a prompt."""
    audio: Annotated[int, OptionSpec(min=0, max=INT32_MAX)] = 32
    """Maximum number of audio clips in a prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTransferConfig(Checked):
    """Groups in which a trainer broadcasts weights. The fields are vLLM's. Raises: ConfigError, which names the field."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Library of the group's collectives. auto: nccl on GPUs, gloo on CPUs."""
    packed_buffer_size_bytes: Annotated[int, OptionSpec(min=1, size=True)] = 2**30
    """Bytes beyond which a pack of tensors is sent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEventsConfig(Checked):
    """Publication of changes of the prefix cache. The fields are vLLM's. Raises: ConfigError, which names the field."""

    enable_kv_cache_events: bool = False
    """Publish events."""
    publisher: Literal["zmq", "null"] = "zmq"
    """zmq: over ZeroMQ. null: nowhere."""
    endpoint: Annotated[str, OptionSpec(min=1)] = "tcp://*:5557"
    """Address of the PUB socket: bound with `*` or `::` in it or without `tcp:`, else connected. Replica i has port + i."""
    replay_endpoint: Annotated[str | None, OptionSpec(min=1, default="no replay")] = None
    """Address of the ROUTER socket that sends events again. The port of replica i is i higher."""
    buffer_steps: Annotated[int, OptionSpec(min=1, max=INT32_MAX)] = 10_000
    """Batches kept for replay."""
    hwm: Annotated[int, OptionSpec(min=1, max=INT32_MAX)] = 100_000
    """Batches that wait for a slow subscriber; further ones are not sent to it."""
    max_queue_size: Annotated[int, OptionSpec(min=1, max=INT32_MAX)] = 100_000
    """Batches that wait for the publishing thread; further ones are dropped, which their missing numbers show."""
    topic: str = ""
    """First frame of every message."""

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def validate(self) -> None:
        super().validate()
        for name, address in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if address is not None and not re.fullmatch(r"tcp://.+:\d+|(ipc|inproc)://.+", address):
                raise ConfigError(f"{name} is {address!r}, and must be tcp://HOST:PORT, ipc://PATH or inproc://NAME", name)
