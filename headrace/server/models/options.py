"""ModelsOptions: options of a server of several models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from headrace.errors import ConfigError
from headrace.host.user_files import check_regular
from headrace.options import MODEL, Checked, OptionSpec, options


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelsOptions(Checked):
    """Several models in one server. Options of the engine on the command line hold for each of them that sets no others."""

    panels = MappingProxyType({"models_config": MODEL})

    models_config: Annotated[Path | None, OptionSpec(metavar="FILE", default="one model, MODEL")] = None
    """YAML file of several models in one server, in place of MODEL: each key is a model's name, its value the model's options
    as in --config. A model is loaded when a request names it."""
    models_memory: Annotated[int | None, OptionSpec(min=1, size=True, default="what is free at the start")] = None
    """Memory for the models of --models-config that are loaded at once: 16GiB, or bytes. The least recently used model is
    unloaded for another one."""
    model_idle_timeout: Annotated[float | None, OptionSpec(above=0.0, metavar="SECONDS", default="none")] = None
    """Seconds after which a model of --models-config that answers nothing is unloaded. Ollama's keep_alive sets it for one
    model."""
    models_max_waiting: Annotated[int, OptionSpec(min=1)] = 256
    """Maximum number of requests that wait for a model of --models-config to be loaded. Another one is answered with HTTP
    503."""

    def validate(self) -> None:
        super().validate()
        if self.models_config is not None:
            check_regular(Path(self.models_config), "models_config")
            return
        given = [name for name, option in options(ModelsOptions).items() if getattr(self, name) != option.default_value]
        if given:
            raise ConfigError(f"{given[0]} is about the models of --models-config, which is not set", given[0])
