"""The server's options: one a field of ServerSettings."""

from __future__ import annotations

from headrace.cli.options import LIMITS, MODEL, SECURITY, Group, Knob
from headrace.cli.options import SERVER as SERVER_PANEL
from headrace.cli.units import parse_size
from headrace.server.settings import ServerSettings

_SERVER_KNOBS = (
    Knob(
        "host",
        SERVER_PANEL,
        "Address to listen on. The default is reached from this machine alone; 0.0.0.0 opens the server to the network, and "
        "then wants --api-key.",
    ),
    Knob("port", SERVER_PANEL, "TCP port. 0 takes a free one, which the log names.", metavar="INTEGER"),
    Knob(
        "uds",
        SERVER_PANEL,
        "Path of a Unix domain socket to listen on in place of host and port: for a proxy on the same machine.",
        metavar="PATH",
    ),
    Knob(
        "served_model_names",
        SERVER_PANEL,
        "Name under which clients ask for the model. Repeatable: the first one is what answers carry, the others are aliases.",
        flags=("--served-model-name",),
        default="the model as it was given",
        metavar="NAME",
    ),
    Knob(
        "drain_timeout",
        SERVER_PANEL,
        "Seconds that requests in flight get to finish after SIGTERM; new ones are refused meanwhile. Match it to your "
        "orchestrator's grace period.",
        metavar="SECONDS",
    ),
    Knob(
        "retry_after",
        SERVER_PANEL,
        "Seconds that refused clients are told to wait (Retry-After of 429 and 503).",
        metavar="SECONDS",
    ),
    Knob("log_requests", SERVER_PANEL, "Write a log line a request. Prompts and answers are never logged."),
)

_SECURITY_KNOBS = (
    Knob(
        "api_keys",
        SECURITY,
        "Key that clients must send as a bearer token. Repeatable, so that keys can be changed without a gap. Prefer the "
        "environment variable HEADRACE_API_KEY (comma-separated): other users can read a command line.",
        flags=("--api-key",),
        default="open to all",
        metavar="KEY",
    ),
    Knob(
        "cors_origins",
        SECURITY,
        "Web origin whose pages may call the API from a browser, such as https://chat.example.com. Repeatable; * for all.",
        flags=("--cors-origin",),
        metavar="ORIGIN",
    ),
    Knob("cors_credentials", SECURITY, "Let those pages send the user's cookies. Needs the origins by name."),
    Knob("tls_cert", SECURITY, "PEM certificate chain. With --tls-key the server speaks HTTPS.", metavar="FILE"),
    Knob("tls_key", SECURITY, "PEM private key of --tls-cert.", metavar="FILE"),
    Knob(
        "max_body_bytes",
        SECURITY,
        "Largest request body: 16MiB, or bytes. Larger ones are refused before they are read.",
        parser=parse_size,
        metavar="SIZE",
        default="16MiB",
    ),
)

_MODEL_KNOBS = (
    Knob(
        "chat_template",
        MODEL,
        "A Jinja file, or the template itself, in place of the model's own chat template.",
        default="the model's own",
        metavar="FILE|TEMPLATE",
    ),
)

_LIMIT_KNOBS = (
    Knob("max_messages", LIMITS, "Most messages in one chat request.", metavar="INTEGER"),
    Knob("max_prompts", LIMITS, "Most prompts in one completions request.", metavar="INTEGER"),
    Knob("max_n", LIMITS, "Largest `n` of a request.", metavar="INTEGER"),
    Knob("max_choices", LIMITS, "Most prompts times `n` of a request.", metavar="INTEGER"),
    Knob("max_logit_bias", LIMITS, "Most tokens in a request's `logit_bias`.", metavar="INTEGER"),
)

SERVER: Group[ServerSettings] = Group(ServerSettings, _MODEL_KNOBS + _SERVER_KNOBS + _SECURITY_KNOBS + _LIMIT_KNOBS)
