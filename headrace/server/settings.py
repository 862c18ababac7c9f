"""ServerSettings: everything an operator may set about the HTTP server. The engine's arguments are ``EngineArgs``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from headrace.errors import ConfigError


def _api_keys() -> tuple[str, ...]:
    """The keys in ``HEADRACE_API_KEY``, separated by commas."""
    return tuple(key.strip() for key in os.environ.get("HEADRACE_API_KEY", "").split(",") if key.strip())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it serves, and how much one request may ask. Frozen.

    Raises:
        ConfigError: a value makes no sense; the error names the setting.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free port, which the log names."""
    uds: str | None = None
    """Path of a Unix domain socket to listen on in place of host and port."""
    api_keys: tuple[str, ...] = dataclasses.field(default_factory=_api_keys)
    """Any one of them opens the API; none: open to all. /health, /ping, /version and /metrics need no key."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the API; ``*`` for all."""
    cors_credentials: bool = False
    tls_cert: Path | None = None
    """PEM certificate chain; with ``tls_key`` the server speaks HTTPS."""
    tls_key: Path | None = None
    served_model_names: tuple[str, ...] = ()
    """Names under which clients ask for the model; the first is the one that answers carry. Empty: the engine's name."""
    chat_template: str | None = None
    """A Jinja file, or the template itself, in place of the model's own chat template."""
    drain_timeout: float = 30.0
    """Seconds that requests in flight get to finish after SIGTERM."""
    retry_after: int = 1
    """Seconds in the Retry-After header of 429 and 503."""
    log_requests: bool = True

    max_body_bytes: int = 16 * 2**20
    max_messages: int = 4096
    max_prompts: int = 256
    """Prompts in one completions request."""
    max_n: int = 128
    max_choices: int = 512
    """Prompts times n."""
    max_logit_bias: int = 1024

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name.startswith("max_") and getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} must be at least 1, not {getattr(self, field.name)}", field.name)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}", "port")
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must not be negative, and is {self.drain_timeout}", "drain_timeout")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ConfigError(f"TLS needs a certificate and its key: {missing} is not set", missing)
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}: there is no file {path}", name)
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key must not be empty", "api_keys")
        if any(not name for name in self.served_model_names):
            raise ConfigError("a served model name must not be empty", "served_model_names")
        if "*" in self.cors_origins and self.cors_credentials:
            raise ConfigError(
                "cors_credentials needs the origins by name: '*' would let any web page act as the user", "cors_credentials"
            )
