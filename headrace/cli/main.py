"""The ``headrace`` program. Commands import torch only when they run, so that ``--help`` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

import headrace
from headrace.cli.bench import app as bench_app
from headrace.cli.chat import chat
from headrace.cli.config import app as config_app
from headrace.cli.doctor import doctor
from headrace.cli.encode import encode
from headrace.cli.explain import explain
from headrace.cli.help import Command
from headrace.cli.models.commands import list_models, pull, remove
from headrace.cli.models.kernels import app as kernels_app
from headrace.cli.run import run
from headrace.cli.serve import serve
from headrace.cli.simulate import simulate

app = typer.Typer(
    name="headrace",
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


app.command("serve", cls=Command)(serve)
app.command("run", cls=Command)(run)
app.command("chat", cls=Command)(chat)
app.command("list", cls=Command)(list_models)
app.command("pull", cls=Command)(pull)
app.command("remove", cls=Command)(remove)
app.add_typer(bench_app, name="bench")
app.command("encode", cls=Command)(encode)
app.command("doctor", cls=Command)(doctor)
app.command("simulate", cls=Command)(simulate)
app.command("explain", cls=Command)(explain)
app.add_typer(config_app, name="config")
app.add_typer(kernels_app, name="kernels")
