"""The ``headrace`` program. A command is imported when it is asked for, and torch only when a command runs: declaring the
options of all commands takes longer than starting one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headrace
from headrace.cli.help import Command

COMMANDS = {
    "serve": ("headrace.cli.serve:serve", "Serve a model over HTTP, with a page to chat."),
    "run": ("headrace.cli.run:run", "Generate for prompts: text on a terminal, JSON into pipes."),
    "chat": ("headrace.cli.chat:chat", "Talk with a model, here or on a server."),
    "list": ("headrace.cli.models.commands:list_models", "List the models in the hub's cache."),
    "pull": ("headrace.cli.models.commands:pull", "Download a model of the hub."),
    "remove": ("headrace.cli.models.commands:remove", "Remove models from the hub's cache."),
    "encode": ("headrace.cli.encode:encode", "Encode pictures with a model's vision part alone."),
    "doctor": ("headrace.cli.doctor:doctor", "Say what would be served, how, and why; here or on other GPUs."),
    "simulate": ("headrace.cli.simulate:simulate", "Simulate a server under a virtual clock."),
    "explain": ("headrace.cli.explain:explain", "Say how one prompt attends, head by head."),
    "bench": ("headrace.cli.bench:app", "Measure this machine, a running server, or other engines."),
    "config": ("headrace.cli.config:app", "Show the configuration, and where each value comes from."),
    "kernels": ("headrace.cli.models.kernels:app", "Export and import compiled kernels."),
}
"""Module and name of each command, a function or a group of commands, and its line of the help, in the help's order."""


def command_of(name: str) -> Callable[..., Any] | typer.Typer:
    """Imports a command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: Callable[..., Any] | typer.Typer = getattr(importlib.import_module(module), attribute)
    return found


class _Commands(MutableMapping[str, Any]):
    """The program's commands as typer has them, each made when it is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            found = command_of(name)
            if isinstance(found, typer.Typer):
                self._made[name] = typer.main.get_group(found)
                self._made[name].name = name
            else:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(name, cls=Command)(found)
                self._made[name] = typer.main.get_command(alone)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Program(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


app = typer.Typer(
    name="headrace",
    cls=_Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # One screen of plain text; --help-all has panels.
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM inference and serving engine. Start with: headrace serve",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(headrace.__version__)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """An LLM inference and serving engine. Start with: headrace serve"""
