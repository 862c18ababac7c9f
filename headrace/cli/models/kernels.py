"""``headrace kernels``: compiled kernels travel from one machine to others of its kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.help import Command
from headrace.cli.options import Group, command
from headrace.errors import ConfigError, human_size
from headrace.host.user_files import check_output, open_input, write_output
from headrace.options import WHAT, Checked, OptionSpec

if TYPE_CHECKING:
    from headrace.startup.kernel_bundle import Content

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Compiled kernels: export them, so that other machines need not compile."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleOptions(Checked):
    panels = MappingProxyType({"file": WHAT})

    file: Annotated[Path | None, OptionSpec(positional=True, metavar="FILE")] = None
    """The bundle of kernels, a zip file."""

    @property
    def path(self) -> Path:
        if self.file is None:
            raise ConfigError("name the file of the bundle, such as kernels.zip", "FILE")
        return self.file


@app.command("export", cls=Command)
@command(options=Group.of(BundleOptions))
def export_kernels(options: BundleOptions) -> None:
    """Write the kernels that this machine has compiled to FILE, for machines with the same GPU and versions.

    Serve the model once before, with --wait-for-kernels: what it has not needed yet is not compiled.
    """
    check_output(options.path, "FILE")
    from headrace.startup.kernel_bundle import caches_here, export, this_machine

    machine = this_machine()
    data, content = export(machine, caches_here())
    write_output(options.path, data, "FILE")
    typer.echo(f"wrote {_describe(content)} for {machine.architecture} to {options.path}, {human_size(len(data))}")


@app.command("import", cls=Command)
@command(options=Group.of(BundleOptions))
def import_kernels(options: BundleOptions) -> None:
    """Put the kernels of a bundle where starts on this machine find them.

    A bundle for other versions, other kernels or another GPU is refused. Its kernels are code that runs: import only bundles
    whose origin you trust.
    """
    with open_input(options.path, "FILE") as file:
        from headrace.startup.kernel_bundle import caches_here, install, this_machine

        content = install(file, this_machine(), caches_here())
    typer.echo(f"imported {_describe(content)}")


def _describe(content: Content) -> str:
    kinds = {"Triton": content.triton, "CUDA C++": content.cuda, "FlashInfer": content.flashinfer}
    counts = ", ".join(f"{name} {count}" for name, count in kinds.items() if count)
    return f"compiled kernels ({counts}; {human_size(content.nbytes)})"
