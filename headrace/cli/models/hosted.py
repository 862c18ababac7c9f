"""The file of --models-config: several models for one server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.config_file import field_name, match, read_sections
from headrace.cli.options import ENGINE_FIELDS, check_names
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.options import LIMITS, MODEL, options
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from headrace.server.models.hosted import Declared

_OF_ONE_MODEL = ("served_model_names", "model_alias", "lora_modules")
"""Settings that each model has for itself."""
_NOT_WITH_SEVERAL = {
    "alias_all_models": "a request names one of the models",
    "codex_instructions": "Codex reads the description of one model",
    "enable_rl_api": "weights that a trainer has changed would be lost when the model is unloaded",
}
_SETTINGS = {
    option.name: option
    for option in options(ServerSettings).values()
    if option.panel in (LIMITS, MODEL) or option.name in (*_OF_ONE_MODEL, "lora_root", "enable_per_request_metrics")
}
"""Settings of the server that a model may have for itself. The others are about connections and clients."""
_KEYS = {field_name(option.key): option for option in (*ENGINE_FIELDS.options, *_SETTINGS.values())}


def read_models(path: Path, args: EngineArgs, settings: ServerSettings) -> list[Declared]:
    """The models of a file, each with the options of the command line where it has none of its own.

    Raises:
        ConfigError: the file has no model or cannot be read, a model is not to be found or an option is wrong, with the line;
            or the command line has options for one model.
    """
    from headrace.server.models.hosted import Declared

    _check_command_line(args, settings)
    found = []
    for section in read_sections(str(path), "--models-config"):
        given = match(section.entries, _KEYS, "a model of --models-config")
        fields = {_KEYS[key].name: value for key, (value, _) in given.items()}
        own = {name: fields.pop(name) for name in tuple(fields) if name in _SETTINGS}
        own["served_model_names"] = (section.key, *own.get("served_model_names", ()))
        try:
            declared = Declared(check_names(dataclasses.replace(args, **fields)), dataclasses.replace(settings, **own))
        except ConfigError as error:
            raise ConfigError(f"{section.where}: {section.key}: {error.message}", error.param) from None
        found.append(declared)
    if not found:
        raise ConfigError(f"{path} has no models: each key is a name, its value the model's options", "--models-config")
    return found


def _check_command_line(args: EngineArgs, settings: ServerSettings) -> None:
    """Raises: ConfigError: it has options for one model, or for what several models cannot have."""
    if args.model is not None:
        raise ConfigError("--models-config names the models: leave MODEL out", "model")
    for name in _OF_ONE_MODEL:
        if getattr(settings, name):
            raise ConfigError(f"each model of --models-config has its own {name}: write it in the file", name)
    for name, why in _NOT_WITH_SEVERAL.items():
        if getattr(settings, name):
            raise ConfigError(f"{name} is not for several models (--models-config): {why}", name)
