"""The commands, and their options."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import MappingProxyType
from typing import Annotated, Any, Literal

from rich.console import Console

from headrace.cli.models.summary import as_table, summarise
from headrace.cli.options import ENGINE_OPTIONS, Group, command
from headrace.config import EngineArgs
from headrace.errors import ConfigError, human_size
from headrace.options import REPORT, WHAT, Checked, OptionSpec
from headrace.sources.locate import locate


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions(Checked):
    panels = MappingProxyType({"format": REPORT})

    format: Literal["auto", "text", "json"] = "auto"
    """Form of the output. json: a line for each model. auto: text on a terminal, else json."""

    def write(self, records: list[dict[str, Any]], text: Any) -> None:
        """Writes the records, or ``text``, which rich renders, for a person."""
        if self.format == "text" or (self.format == "auto" and sys.stdout.isatty()):
            Console(highlight=False, soft_wrap=isinstance(text, str)).print(text, markup=False)
        else:
            sys.stdout.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoveOptions(OutputOptions):
    panels = MappingProxyType({"models": WHAT, "format": REPORT})

    models: Annotated[tuple[str, ...], OptionSpec(positional=True, metavar="MODEL...")] = ()
    """Models to remove, as `headrace list` names them."""

    def validate(self) -> None:
        super().validate()
        if not self.models:
            raise ConfigError("name the models to remove; headrace list names those that there are", "MODEL")


@command(options=Group.of(OutputOptions))
def list_models(options: OutputOptions) -> None:
    """List the models in the hub's cache, last used first: which of them headrace runs, their size and format."""
    from headrace.sources.hub_cache import cached_models

    found = [summarise(model) for model in cached_models()]
    options.write([summary.record() for summary in found], as_table(found))


@command(args=ENGINE_OPTIONS.only("model", "revision", "trust_remote_code"), options=Group.of(OutputOptions))
def pull(args: EngineArgs, options: OutputOptions) -> None:
    """Download a model of the hub into its cache, as `headrace serve` does where the cache lacks it.

    REPO:Q4_K_M is the GGUF file of a repository that is quantised so. Pickles are never downloaded.
    """
    if args.model is None or locate(args.model) is not None:
        raise ConfigError(f"name a model of the hub{f'; {args.model} is a local path' if args.model else ''}", "model")
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from headrace.sources.hub import fetch
    from headrace.sources.hub_cache import model_at

    if not sys.stderr.isatty():
        disable_progress_bars()
    model = model_at(fetch(args.model, args.revision, args.load_format, code=args.trust_remote_code))
    if model.format == "none":
        raise ConfigError(f"the hub's {args.model} has neither safetensors nor GGUF files", "model")
    summary = summarise(model)
    text = f"{model.name}: {human_size(model.size)}, {summary.architecture or 'unknown architecture'}, {summary.verdict}"
    options.write([summary.record()], text)


@command(options=Group.of(RemoveOptions))
def remove(options: RemoveOptions) -> None:
    """Remove models from the hub's cache: whole repositories with all revisions, or single GGUF files (REPO:Q4_K_M)."""
    from headrace.sources import hub_cache

    freed = {name: hub_cache.remove(name) for name in options.models}
    options.write(
        [{"model": name, "freed": size} for name, size in freed.items()],
        "\n".join(f"removed {name}: {human_size(size)}" for name, size in freed.items()),
    )
