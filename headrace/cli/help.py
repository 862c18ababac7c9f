"""Help of the commands: one screen by ``--help``, everything by ``--help-all``."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headrace.cli.errors import EXIT_USAGE, print_error
from headrace.cli.peer_options import SEVERAL_MODELS, translated

ESSENTIAL = frozenset(
    {
        *("model", "quantization", "tensor-parallel-size", "max-model-len", "kv-cache-memory", "models-config"),
        *("max-tokens", "temperature", "structured-outputs", "host", "port", "api-key", "config"),
        *("prompts", "input", "output", "chat", "image", "url", "system", "prompt", "prompt-file", "png"),
        *("pictures", "load", "help-all", "help", "parity", "json", "trace", "workload", "replicas"),
    }
)
"""Long names of the options that ``--help`` shows, each with the first sentence of its help."""


class Command(TyperCommand):
    """A command with a short help, which knows the option names of other engines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # An argument has its parameter's name, args__model.
        self._hidden = {
            p.name for p in self.params if not any(flag.lstrip("-").rpartition("__")[2] in ESSENTIAL for flag in p.opts)
        }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for parameter in self.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        words = translated(args, known)
        # Its own message for a second model.
        ctx.allow_extra_args = "--models-config" in known
        rest: list[str] = super().parse_args(ctx, words)
        if rest:
            print_error(f"{' '.join(rest)}: {SEVERAL_MODELS}")
            raise typer.Exit(EXIT_USAGE)
        return rest

    def get_help(self, ctx: Any, *, whole: bool = False) -> str:
        """The text; with ``whole``, the panels are printed, and the text is empty."""
        self.rich_markup_mode = "rich" if whole else None
        shown: list[Any] = list(self.params)
        helps = [parameter.help for parameter in shown]
        for parameter in shown if not whole else ():
            parameter.hidden = parameter.name in self._hidden
            parameter.help = re.split(r"(?<=[.:]) ", parameter.help)[0].rstrip(":")
        try:
            return super().get_help(ctx)
        finally:
            for parameter, text in zip(shown, helps, strict=True):
                parameter.hidden, parameter.help = False, text


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        command: Any = context.command
        typer.echo(command.get_help(context, whole=True), nl=False)
        raise typer.Exit


HELP_ALL = Annotated[
    bool,
    typer.Option("--help-all", help="Show all options, and more about these.", callback=_show_all, is_eager=True),
]
