"""Options of single commands, beside those of the engine and of the server. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from headrace.errors import ConfigError
from headrace.host.user_files import check_output, check_regular, near, read_text
from headrace.options import CONVERSATION, DEBUGGING, PROMPTS, REPORT, SERVER, WHAT, Checked, OptionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogOptions(Checked):
    panels = MappingProxyType({"log_level": DEBUGGING})

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level. debug adds lines about each request from the engine process."""
    report: Annotated[bool, OptionSpec(flags=("--report",))] = False
    """Print the whole start-up report, as `headrace doctor` does: seconds of each phase, memory, attention of each layer, every
    decision with its reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(Checked):
    panels = MappingProxyType({"url": SERVER, "system": CONVERSATION})

    url: str | None = None
    """Talk to a running OpenAI-compatible server, such as http://127.0.0.1:8000, and load no model here. MODEL is then the name
    of one of its models."""
    api_key: Annotated[str | None, OptionSpec(secret=True, default="the environment's HEADRACE_API_KEY")] = dataclasses.field(
        default_factory=lambda: os.environ.get("HEADRACE_API_KEY", "").strip() or None,
        metadata={"environment": "HEADRACE_API_KEY"},
    )
    """Key for --url."""
    system: str | None = None
    """The system message to begin with."""
    chat_template: Annotated[str | None, OptionSpec(metavar="FILE|TEMPLATE")] = None
    """Jinja file, or the template itself, that replaces the model's chat template."""
    markdown: bool = True
    """Render replies as Markdown on a terminal."""

    def validate(self) -> None:
        super().validate()
        if self.chat_template is not None:
            from headrace.text.chat import check_template  # Later, for the sake of the commands that have no template.

            check_template(self.chat_template)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions(Checked):
    panels = MappingProxyType({"load": REPORT})

    load: Annotated[bool, OptionSpec(flags=("--load",))] = False
    """Also load the weights and run a first step, to measure the timeline and the memory."""
    devices: Annotated[str | None, OptionSpec(metavar="GPU[:COUNT]", default="those of this machine")] = None
    """Report on GPUs that need not be here, such as h200:4. The model is split over all of them, or over as many as
    --tensor-parallel-size says."""
    parity: Annotated[bool, OptionSpec(flags=("--parity",))] = False
    """Replace the report by a comparison: run prompts through every implementation of the model and through its library's own
    forward (transformers', or Megatron's for its checkpoints), in float32 and in the dtype that would be served, and compare
    logprobs, layers and tokens. Exit code 0: they agree; 1: they do not. Loads the model several times."""
    image_size: Annotated[tuple[str, ...], OptionSpec(metavar="WIDTHxHEIGHT", default="1024x1024, for a model that sees")] = ()
    """Report the number of tokens of a picture of this size, such as 1024x768."""
    as_json: Annotated[bool, OptionSpec(flags=("--json",))] = False
    """Print the report as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeOptions(Checked):
    panels = MappingProxyType({"pictures": PROMPTS})

    pictures: Annotated[tuple[Path, ...], OptionSpec(positional=True, metavar="FILE...")] = ()
    """Files of pictures."""
    output: Annotated[
        Path | None, OptionSpec(flags=("--output", "-o"), metavar="DIRECTORY", default="that of each picture")
    ] = None
    """Directory for the features."""

    def validate(self) -> None:
        super().validate()
        if not self.pictures:
            raise ConfigError("name the files of pictures to encode", "FILE")
        for path in self.pictures:
            check_regular(path, "FILE")
        if self.output is not None and not self.output.is_dir():
            raise ConfigError(f"there is no directory {self.output}{near(self.output)}", "--output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions(Checked):
    panels = MappingProxyType({"prompt": PROMPTS, "layer": REPORT})

    prompt: str | None = None
    """The prompt, as text."""
    prompt_file: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """Text file with the prompt."""
    layer: Annotated[int, OptionSpec(min=0)] = 0
    """Layer of the head whose blocks are shown."""
    head: Annotated[int, OptionSpec(min=0)] = 0
    """Query head whose blocks are shown."""
    as_json: Annotated[bool, OptionSpec(flags=("--json",))] = False
    """Print everything as JSON."""
    html: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """Write a page with pictures and numbers."""
    png: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """Write a picture: the density of each layer's heads, and the blocks of keys that one head attends to."""

    def validate(self) -> None:
        super().validate()
        if (self.prompt is None) == (self.prompt_file is None):
            raise ConfigError("give the prompt by --prompt or by --prompt-file", "--prompt")
        check_output(self.html, "--html")
        check_output(self.png, "--png")

    @property
    def text(self) -> str:
        """The prompt.

        Raises:
            ConfigError: its file cannot be read.
        """
        return self.prompt or "" if self.prompt_file is None else read_text(self.prompt_file, "--prompt-file")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateOptions(Checked):
    panels = MappingProxyType({"config": WHAT})

    config: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """JSON file: calibration, replicas, routing policy, traffic, failures."""
    trace: Annotated[Path | None, OptionSpec(metavar="FILE")] = None
    """JSONL file of requests in place of the configuration's traffic: at, input_tokens, output_tokens, and prefix,
    prefix_tokens, session; or lines of Mooncake's traces."""
