"""ServerSettings: everything an operator may set about the HTTP server. The engine's arguments are ``EngineArgs``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from headrace.errors import ConfigError
from headrace.host.user_files import check_regular
from headrace.metrics.stats import MetricsCompat
from headrace.options import LIMITS, MODEL, SECURITY, SERVER, Checked, OptionSpec
from headrace.sampling_params import MAX_SAMPLES


def _keys(variable: str) -> tuple[str, ...]:
    """The keys in an environment variable, separated by commas."""
    return tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings(Checked):
    """Settings of the server: where it listens, whom it serves, and limits on one request. Frozen.

    Raises:
        ConfigError: a value makes no sense; the error names the setting.
    """

    panels = MappingProxyType({"host": SERVER, "api_keys": SECURITY, "max_messages": LIMITS, "enable_auto_tool_choice": MODEL})

    host: str = "127.0.0.1"
    """Address to listen on. The default accepts connections from this machine only; 0.0.0.0 opens the server to the network
    and needs --api-key."""
    port: Annotated[int, OptionSpec(min=0, max=65535)] = 8000
    """TCP port. 0 takes a free port, which the log names."""
    uds: Annotated[str | None, OptionSpec(metavar="PATH")] = None
    """Path of a Unix domain socket to listen on in place of host and port, for a proxy on the same machine."""
    ui: bool = True
    """Answer browsers at / with a page to chat. Where there are API keys, it asks for one."""
    served_model_names: Annotated[
        tuple[str, ...], OptionSpec(min=1, flags=("--served-model-name",), default="the model as it was given", metavar="NAME")
    ] = ()
    """Model name that clients use. Repeatable: responses carry the first name, the others are aliases."""
    alias_all_models: bool = False
    """Answer requests for any model, with the name that they have for it: for agents that name the models of their provider."""
    model_alias: Annotated[tuple[str, ...], OptionSpec(min=1, default="no aliases", metavar="PATTERN=NAME")] = ()
    """Further names of the model, as a pattern with * and ?, and a NAME of --served-model-name that they stand for:
    'claude-*=qwen'. Repeatable. Answers have the name that the client used."""
    lora_modules: Annotated[tuple[str, ...], OptionSpec(min=3, default="no adapters", metavar="NAME=PATH")] = ()
    """LoRA adapter to load before requests are taken, with --enable-lora: the name that requests use, and its directory.
    Repeatable."""
    lora_root: Annotated[Path | None, OptionSpec(default="none", metavar="DIRECTORY")] = None
    """Directory of adapters that clients may load while the server runs, with those in its subdirectories. Without it they may
    load none."""
    codex_instructions: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """Text file with the system prompt that Codex uses in place of its own. With it, /v1/models describes the model in the form
    that Codex reads, its context window among the rest."""
    drain_timeout: Annotated[float, OptionSpec(min=0.0, metavar="SECONDS")] = 30.0
    """Seconds that requests in flight get to finish after SIGTERM, while new ones are refused. Set it below the grace
    period of your orchestrator."""
    retry_after: Annotated[int, OptionSpec(min=0, metavar="SECONDS")] = 1
    """Seconds in the Retry-After header of HTTP 429 and 503 responses."""
    ready_timeout: Annotated[float, OptionSpec(min=0.0, metavar="SECONDS")] = 30.0
    """Seconds for which a request waits for an engine that starts or restarts, before it is answered with HTTP 503. 0 answers
    at once, for a load balancer that has other servers."""
    log_requests: bool = True
    """Log one line for each request. Prompts and outputs are never logged."""
    enable_per_request_metrics: Annotated[bool, OptionSpec(flags=("--enable-per-request-metrics",))] = False
    """Add `metrics` to every answer with one choice: time in the queue, time to first token, time between tokens. A request
    asks for it alone with `return_metrics`."""
    metrics_compat: MetricsCompat | None = None
    """Export metrics under another engine's names too, with the same values, for its dashboards and autoscalers."""
    api_keys: Annotated[
        tuple[str, ...], OptionSpec(min=1, flags=("--api-key",), default="no key is needed", metavar="KEY", secret=True)
    ] = dataclasses.field(default_factory=lambda: _keys("HEADRACE_API_KEY"), metadata={"environment": "HEADRACE_API_KEY"})
    """API key, which clients send as a bearer token; /, /health, /ready, /live, /ping, /version and /metrics need none.
    Repeatable, so that keys can be rotated. Prefer the environment variable HEADRACE_API_KEY (comma-separated): other users of
    the machine can read a command line."""
    enable_rl_api: Annotated[bool, OptionSpec(flags=("--enable-rl-api",))] = False
    """Answer the routes by which trainers pause generation and change the weights, under the names of vLLM and SGLang. Without
    it, and where there are API keys without --admin-key, they are 404."""
    admin_keys: Annotated[
        tuple[str, ...], OptionSpec(min=1, flags=("--admin-key",), default="none", metavar="KEY", secret=True)
    ] = dataclasses.field(default_factory=lambda: _keys("HEADRACE_ADMIN_KEY"), metadata={"environment": "HEADRACE_ADMIN_KEY"})
    """API key that --enable-rl-api's routes need where there are API keys; it opens the others too. Repeatable. Prefer the
    environment variable HEADRACE_ADMIN_KEY."""
    allow_pull: Annotated[bool, OptionSpec(flags=("--allow-pull",))] = False
    """Download models of the hub into its cache for clients of Ollama's /api/pull. Where there are API keys, this needs one of
    --admin-key."""
    weight_root: Annotated[Path | None, OptionSpec(default="no directory", metavar="DIRECTORY")] = None
    """Directory of the checkpoints that trainers may name, such as /dev/shm for checkpoints in memory."""
    enable_memory_saver: Annotated[bool, OptionSpec(flags=("--enable-memory-saver",))] = False
    """Tell slime, by SGLang's name in /server_info, that its trainer may take the GPU between rollouts. Give it just where the
    trainer has --offload-rollout: slime refuses a server that says otherwise. It says no without the routes of --enable-rl-api;
    sleep itself needs these alone."""
    pause_timeout: Annotated[float | None, OptionSpec(above=0.0, default="none", metavar="SECONDS")] = None
    """Seconds after which the log warns of a pause, once a minute. The pause goes on."""
    cors_origins: Annotated[tuple[str, ...], OptionSpec(flags=("--cors-origin",), metavar="ORIGIN")] = ()
    """Web origin whose pages may call the API from a browser, such as https://chat.example.com. Repeatable; * for all."""
    cors_credentials: bool = False
    """Let pages of these origins send the user's cookies. Not allowed with origin *."""
    allowed_hosts: Annotated[tuple[str, ...], OptionSpec(min=1, flags=("--allowed-host",), metavar="NAME")] = ()
    """Host name, without the port, by which clients may address the server; requests with another Host header are refused.
    Repeatable; without it every name is accepted. It keeps web pages from reaching a server without keys through a name of
    their own that resolves to its address (DNS rebinding)."""
    tls_cert: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """PEM certificate chain. With --tls-key, the server speaks HTTPS."""
    tls_key: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """PEM private key of --tls-cert."""
    max_body_bytes: Annotated[int, OptionSpec(min=1, size=True, default="16MiB")] = 16 * 2**20
    """Maximum size of a request body: 16MiB, or bytes. A larger body is refused before it is read."""
    max_bytes_in_flight: Annotated[int, OptionSpec(min=1, size=True, default="128MiB")] = 128 * 2**20
    """Maximum size of all request bodies that are being received or made into requests of the engine, counted as they arrive.
    Each API key has an equal share. While that is used up, bodies above 64KiB are refused with HTTP 503; one alone is always
    taken."""
    max_json_values: Annotated[
        int | None, OptionSpec(min=1, default="400000, or twice the model's context length if that is more")
    ] = None
    """Maximum number of JSON values in a request body, estimated from its punctuation: a string, a list or an object counts
    as four numbers or more. It bounds the time for which decoding a body holds up other requests."""
    max_header_bytes: Annotated[int, OptionSpec(min=1, size=True, default="64KiB")] = 64 * 2**10
    """Maximum size of a request's line and headers together."""
    max_url_bytes: Annotated[int, OptionSpec(min=1, size=True, default="8KiB")] = 8 * 2**10
    """Maximum size of a request's URL."""
    max_connections: Annotated[int, OptionSpec(min=1)] = 4096
    """Maximum number of open connections. Another one is answered with HTTP 503 and closed. The system's limit of open files
    may lower it."""
    header_timeout: Annotated[float, OptionSpec(above=0.0, metavar="SECONDS")] = 30.0
    """Seconds in which a request's headers must arrive, from the first byte or from the opening of the connection."""
    body_timeout: Annotated[float, OptionSpec(above=0.0, metavar="SECONDS")] = 60.0
    """Seconds in which a request's body must arrive after its headers. Raise it for large bodies over slow networks."""
    send_timeout: Annotated[float, OptionSpec(above=0.0, metavar="SECONDS")] = 60.0
    """Seconds after which a client that takes nothing of its answer is disconnected."""
    keep_alive_timeout: Annotated[float, OptionSpec(above=0.0, metavar="SECONDS")] = 75.0
    """Seconds for which an idle connection stays open. Set it above the idle time after which a proxy in front of the server
    closes its connections."""
    max_messages: Annotated[int, OptionSpec(min=1)] = 4096
    """Maximum number of messages in a chat request."""
    max_chat_values: Annotated[int, OptionSpec(min=1)] = 65_536
    """Maximum number of JSON values in `messages` of a request, nested ones included, and as many in `chat_template_kwargs`."""
    max_prompt_logprobs: Annotated[int, OptionSpec(min=1)] = 524_288
    """Maximum number of log-probabilities of prompt tokens in one answer: prompt tokens times (`prompt_logprobs` + 1), for
    completions times `n`. An entry takes about 70 bytes."""
    max_prompts: Annotated[int, OptionSpec(min=1)] = 256
    """Maximum number of prompts in a completions request, of texts to embed in a request, and of documents to score."""
    max_n: Annotated[int, OptionSpec(min=1)] = MAX_SAMPLES
    """Maximum `n` of a request."""
    max_choices: Annotated[int, OptionSpec(min=1)] = 512
    """Maximum number of prompts times `n` of a request."""
    max_logit_bias: Annotated[int, OptionSpec(min=1)] = 1024
    """Maximum number of tokens in `logit_bias`."""
    enable_auto_tool_choice: bool = True
    """Look for tool calls in the answers to requests that offer tools. Without it, such requests are refused unless they set
    tool_choice to none."""
    exclude_tools_when_tool_choice_none: bool = False
    """Leave tools out of the prompt where tool_choice is none. Without it the model is shown them, so that turns of a
    conversation share their prefix in the cache."""
    responses_store: bool = True
    """Keep responses of /v1/responses in memory, unless a request says store: false, so that clients may get them again and
    continue them by previous_response_id."""
    responses_store_entries: Annotated[int, OptionSpec(min=1)] = 4096
    """Maximum number of stored responses. Each API key has an equal share, within which the least recently used response makes
    room for a new one."""
    responses_store_bytes: Annotated[int, OptionSpec(min=1, size=True, default="256MiB")] = 256 * 2**20
    """Maximum size of all stored responses; each API key has an equal share. A response holds the conversation that led to it,
    and its tokens."""
    responses_store_ttl: Annotated[float, OptionSpec(above=0.0, metavar="SECONDS")] = 86400.0
    """Seconds for which a response is stored."""
    max_feature_bytes: Annotated[int, OptionSpec(min=1, size=True, default="64MiB")] = 2**26
    """Maximum size of one upload of features to /v1/features."""
    features_bytes: Annotated[int, OptionSpec(min=1, size=True, default="1GiB")] = 2**30
    """Maximum size of all uploaded features. Each API key has an equal share, and further uploads are refused while it is used
    up."""
    features_ttl: Annotated[float, OptionSpec(above=0.0, metavar="SECONDS")] = 3600.0
    """Seconds for which uploaded features are kept."""
    unsupported_tools: Literal["auto", "skip", "refuse"] = "auto"
    """Treatment of tools that the server would have to run itself, in requests to /v1/responses and /v1/messages. auto: those
    that agents offer with every request and can do without, such as web search, are left out of the prompt and listed in the
    log and in `metadata.skipped_tools`; unknown types are refused. skip: all are left out. refuse: requests are refused."""
    agent_compat: Literal["auto", "strict"] = "auto"
    """Treatment of fields that this server does not know, and of hints that it does not follow, in requests of Claude Code and
    Codex, which are known by their User-Agent. auto: they are left out, and the log names them. strict: the request is refused,
    like those of other clients."""
    keep_client_headers: bool = False
    """Keep the line x-anthropic-billing-header at the start of system prompts in /v1/messages. Some agents send it with another
    value in each request, so that no prefix would be found in the cache: without this option it is left out."""
    reasoning_field: Literal["both", "reasoning_content", "reasoning"] = "both"
    """Field of messages and deltas that has the reasoning: reasoning_content (SGLang, DeepSeek), reasoning (vLLM), or both."""
    escape_special_tokens: Literal["none", "user"] = "none"
    """Authors whose messages may not spell special tokens and the markers of answers. user: those that the messages of users
    and tools spell are encoded as ordinary text, so that no quoted text can end a turn. none: they become the tokens, as the
    model's tokenizer has it."""
    chat_template: Annotated[str | None, OptionSpec(default="the model's own", metavar="FILE|TEMPLATE")] = None
    """Jinja file, or the template itself, that replaces the model's chat template."""

    trust_request_chat_template: Annotated[bool, OptionSpec(flags=("--trust-request-chat-template",))] = False
    """Take chat_template of chat requests. Templates run in a sandbox, within the limits of --max-template-seconds and
    --max-template-memory; tool calls and reasoning are looked for as in answers to the model's own."""

    def share(self, total: int) -> int:
        """An API key's part of what all of them share; all of it where there are no keys."""
        return max(1, total // max(1, len(set(self.api_keys))))

    @property
    def trains(self) -> bool:
        """Whether the routes of ``enable_rl_api`` are there."""
        return self.enable_rl_api and bool(self.admin_keys or not self.api_keys)

    def validate(self) -> None:
        super().validate()
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ConfigError(f"TLS needs a certificate and its key: {missing} is not set", missing)
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None:
                check_regular(Path(path), name)
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not name or not path:
                raise ConfigError(f"lora_modules must be NAME=PATH, not {module!r}", "lora_modules")
            if name in self.served_model_names:
                raise ConfigError(f"lora_modules has {name!r}, which is a name of the model", "lora_modules")
        for alias in self.model_alias:
            pattern, _, name = alias.partition("=")
            if not pattern or name not in self.served_model_names:
                message = f"model_alias must be PATTERN=NAME with a NAME of --served-model-name, not {alias!r}"
                raise ConfigError(message, "model_alias")
        if self.chat_template is not None:
            from headrace.text.chat import check_template  # Later, for the sake of the commands that have no template.

            check_template(self.chat_template)
        if self.codex_instructions is not None:
            check_regular(Path(self.codex_instructions), "codex_instructions")
        if "*" in self.cors_origins and self.cors_credentials:
            raise ConfigError(
                "cors_credentials needs the origins by name: '*' would let any web page act as the user", "cors_credentials"
            )
