"""``headrace config show``: the configuration of ``headrace serve``, and where each value comes from."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import typer

from headrace.cli.options import ENGINE_FIELDS, Setting, command
from headrace.cli.own_options import LogOptions
from headrace.cli.serve import LOG_OPTIONS, MODELS_OPTIONS, SERVER_OPTIONS
from headrace.config import EngineArgs
from headrace.server.models.options import ModelsOptions
from headrace.server.settings import ServerSettings

_WIDTH = 56
"""Most characters of a line before the source of its value, unless the value takes more."""

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Configuration files.")


@app.command("show")
@command(args=ENGINE_FIELDS, settings=SERVER_OPTIONS, models=MODELS_OPTIONS, logging=LOG_OPTIONS)
def show(
    args: EngineArgs, settings: ServerSettings, models: ModelsOptions, logging: LogOptions, sources: list[Setting]
) -> None:
    """Print what `headrace serve` with the same options would use, and where each value comes from.

    The output is a configuration file itself. Values of API keys are left out.
    """
    lines = [(_line(setting), setting.source) for setting in sources]
    width = min(_WIDTH, max(len(line) for line, _ in lines))
    for line, source in lines:
        sys.stdout.write(f"{line.ljust(width)}  # {source}\n")


def _line(setting: Setting) -> str:
    if setting.secret and setting.value:
        return f"# {setting.key}: {len(setting.value)} values that are not shown"
    return f"{setting.key}: {_yaml(setting.value)}"


def _yaml(value: Any) -> str:
    import yaml

    plain = msgspec.to_builtins(value, enc_hook=str)
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()
