"""Command-line options for the declared fields of a class: one option a field, nothing accepted and dropped.

A command asks for a whole group by a parameter of its function:

    @command(args=ENGINE_OPTIONS, settings=SERVER_OPTIONS)
    def serve(args: EngineArgs, settings: ServerSettings) -> None: ...

Options that were not given are not passed on, so that the class's own defaults (and its environment variables) apply.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, Self, TypeVar

import typer
from typer.models import ArgumentInfo

from headrace.cli.config_file import field_name, match, read_config
from headrace.cli.errors import reported
from headrace.cli.help import HELP_ALL
from headrace.cli.units import parse_size
from headrace.config import EngineArgs
from headrace.constrain.fields import folded
from headrace.errors import ConfigError, RequestError
from headrace.host.clock import process_start
from headrace.host.user_files import check_output
from headrace.options import DEBUGGING, PANELS, Option, check_value, from_json, is_declared, options
from headrace.processes.spawn import Spawned, spawn
from headrace.sampling_params import SamplingParams, StructuredOutputsParams
from headrace.sources.locate import locate

T = TypeVar("T")

DEBUG = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error in place of its one-line message. Turn it on to report a bug.",
        rich_help_panel=DEBUGGING,
    ),
]


@dataclasses.dataclass(frozen=True)
class Group(Generic[T]):
    """The options of one class. ``cls`` is called with the fields that were given."""

    cls: Callable[..., T]
    options: tuple[Option, ...]

    @classmethod
    def of(cls, declared: Callable[..., T]) -> Self:
        """Every declared field of a class, by panel."""
        return cls(declared, tuple(sorted(options(declared).values(), key=lambda option: PANELS.index(option.panel))))

    def without(self, *fields: str) -> Self:
        """Returns the group for a command in which these fields have no meaning."""
        unknown = set(fields) - {option.name for option in self.options}
        if unknown:
            raise ValueError(f"no such options: {sorted(unknown)}")
        return dataclasses.replace(self, options=tuple(o for o in self.options if o.name not in fields))

    def only(self, *fields: str) -> Self:
        """Returns the group for a command in which these fields alone have a meaning."""
        return self.without(*(option.name for option in self.options if option.name not in fields))

    def changed(self, field: str, **spec: Any) -> Self:
        """Returns the group with another declaration of one field."""
        return dataclasses.replace(
            self,
            options=tuple(
                dataclasses.replace(o, spec=dataclasses.replace(o.spec, **spec)) if o.name == field else o for o in self.options
            ),
        )

    def given(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the options that were set on the command line, by field; a repeatable option that was not used counts as not
        set."""
        tuples = {option.name for option in self.options if typing.get_origin(option.type) is tuple}
        return {
            field: tuple(value) if field in tuples else value
            for field, value in values.items()
            if value is not None and value != []
        }

    def build(self, values: dict[str, Any]) -> T:
        return self.cls(**values)

    def parameters(self, prefix: str) -> list[inspect.Parameter]:
        """A keyword parameter a field, named ``prefix__field``, annotated for typer."""
        return [
            inspect.Parameter(
                f"{prefix}__{option.name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(option)
            )
            for option in self.options
        ]


def _annotation(option: Option) -> Any:
    spec = option.spec
    parser = parse_size if spec.size else _PARSERS.get(option.type)
    if is_declared(option.type):
        parser = _json_object(option)
    choices = typing.get_args(option.type) if typing.get_origin(option.type) is Literal else ()
    if choices:
        parser = functools.partial(_word, option)
    value_type = str if parser else option.type
    if typing.get_origin(value_type) is tuple:
        value_type = list[typing.get_args(value_type)[0]]  # type: ignore[misc]
    flag = "--" + option.name.replace("_", "-")
    flags = spec.flags or ((f"{flag}/--no-{flag[2:]}",) if value_type is bool else (flag,))
    repeats = value_type == list[str] and not spec.positional and "Repeatable" not in option.help
    shown = spec.default or _shown(option.default_value)
    common: dict[str, Any] = {
        "help": option.help + (" Repeatable." if repeats else "") + ("" if shown is None else f" Default: {shown}."),
        "rich_help_panel": option.panel,
        "show_default": False,
        "metavar": spec.metavar or ("SIZE" if spec.size else "|".join(choices) or None),
    }
    if parser is not None:
        common["parser"] = _checked(parser)
    if spec.positional:
        return Annotated[value_type | None, typer.Argument(**common)]
    return Annotated[value_type | None, typer.Option(*flags, **common)]


def _word(option: Option, text: str) -> str:
    """One of the option's words."""
    option.check(text)
    return text


def _checked(parser: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser with its ValueError as a usage error that typer prints beside the option's name."""

    @functools.wraps(parser)
    def parse(text: str) -> Any:
        try:
            return parser(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _shown(default: Any) -> str | None:
    if default is None or default == [] or default == ():
        return None
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


class Setting(NamedTuple):
    """The value of one option of a command, and where it comes from."""

    key: str
    value: Any
    source: str
    """command line, environment NAME, FILE:LINE, or default."""
    secret: bool


class _Invocation(NamedTuple):
    """The value of ``--config`` and the context that it was parsed in."""

    path: str | None
    context: typer.Context


def _invocation(context: typer.Context, path: str | None) -> Any:
    return _Invocation(path, context)


CONFIG = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="YAML file of options: each key is a long option without its dashes, MODEL is model. Options on the command line "
        "come before environment variables, those before the file.",
        callback=_invocation,
        metavar="FILE",
    ),
]


def command(**groups: Group[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Expands each parameter named in ``groups`` into its options, adds ``--debug``, ``--help-all`` and, unless a group has an
    option of that name, ``--config``, and reports errors as one line.

    A parameter ``sources`` of the function gets the Setting of every option.
    """
    keys = {field_name(option.key): option for group in groups.values() for option in group.options}

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        wants_sources = "sources" in inspect.signature(function).parameters
        parameters = [parameter for name, group in groups.items() for parameter in group.parameters(name)]
        parameters.append(inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DEBUG))
        if groups and "config" not in keys:
            parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=CONFIG))
        parameters.append(inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HELP_ALL))
        parameters.sort(key=_place)

        @functools.wraps(function)
        def run(*, debug: bool, help_all: bool = False, config: _Invocation | None = None, **values: Any) -> None:
            with reported(debug):
                in_file = {}
                if config is not None and config.path is not None:
                    in_file = match(read_config(config.path), keys, config.context.command_path)
                arguments, settings = _merged(groups, in_file, values)
                function(**arguments, **({"sources": settings} if wants_sources else {}))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__
        return run

    return decorate


def _merged(
    groups: dict[str, Group[Any]], in_file: dict[str, tuple[Any, str]], values: dict[str, Any]
) -> tuple[dict[str, Any], list[Setting]]:
    """Arguments of the command's function, from the command line, the environment, the configuration file and the defaults,
    the first that has a value; and the Settings."""
    arguments: dict[str, Any] = {}
    settings: list[Setting] = []
    for prefix, group in groups.items():
        given = group.given({option.name: values[f"{prefix}__{option.name}"] for option in group.options})
        fields = {}
        for option in group.options:
            found = in_file.get(field_name(option.key))
            if option.name in given:
                fields[option.name], source = given[option.name], "command line"
            elif (variable := option.environment) and os.environ.get(variable, "").strip():
                source = f"environment {variable}"  # The class reads it, as it reads its defaults.
            elif found is not None:
                fields[option.name], source = found
            else:
                source = "default"
            settings.append(Setting(option.key, fields.get(option.name, option.default_value), source, option.spec.secret))
        arguments[prefix] = group.build(fields)
    return arguments, settings


def _place(parameter: inspect.Parameter) -> int:
    """Returns the place of a parameter in the help: arguments, options of every command, then the panels in their order."""
    (info,) = parameter.annotation.__metadata__
    if isinstance(info, ArgumentInfo):
        return -2
    return PANELS.index(info.rich_help_panel) if info.rich_help_panel in PANELS else -1


def int_or_auto(text: str) -> int | Literal["auto"]:
    """A number, or the word auto."""
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a whole number nor 'auto'") from None


def _token_ids(text: str) -> list[int]:
    """Ids written as 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of token ids such as 11,42") from None


def _token_numbers(text: str) -> dict[int, float]:
    """A JSON object from token id to number."""
    try:
        return {int(token): float(number) for token, number in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f'{text!r} is not a JSON object from token id to number, such as {{"42": -5}}') from None


def _json_object(option: Option) -> Callable[[str], Any]:
    """A JSON object of the option's class of declared fields."""

    def parse(text: str) -> Any:
        try:
            fields = _fields(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{text!r} is not a JSON object of {', '.join(options(option.type))}")
        try:
            return option.from_json(fields)
        except (RequestError, ConfigError) as error:
            raise ValueError(error.message) from None

    return parse


def _fields(text: str) -> Any:
    """A JSON value; or an object's fields as in ``image=2,video=1``, which vLLM's users write."""
    if "=" not in text or text.lstrip()[:1] in ("{", "["):
        return json.loads(text)
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): json.loads(value) for name, _, value in pairs}


_PARSERS: dict[Any, Callable[[str], Any]] = {
    int | Literal["auto"]: int_or_auto,
    list[int]: _token_ids,
    dict[int, float]: _token_numbers,
}
"""Parsers from the written word to a field's type; what typer parses itself is not here. The field's class checks ranges."""


class SamplingGroup(Group[SamplingParams]):
    """Builds the fields that were given, checked, in place of a whole SamplingParams.

    The model's own defaults come from its files, and a line of an input file may override an option.
    """

    def build(self, values: dict[str, Any]) -> Any:
        return checked_fields(values)


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters, as JSON has them, in the types that SamplingParams keeps.

    Raises:
        RequestError: a name is not a sampling parameter, or a value is of the wrong type or out of range.
    """
    converted = from_json(SamplingParams, folded(fields))
    for name, value in converted.items():
        check_value(options(SamplingParams)[name], value, RequestError)
    return converted


MAX_TOKENS = 2048
"""Default of --max-tokens in a terminal, where nobody may be there to stop an output that does not end."""


class EngineGroup(Group[EngineArgs]):
    """Reports a mistyped name of a model, a file or a format of answers before anything heavy is imported."""

    def build(self, values: dict[str, Any]) -> EngineArgs:
        return check_names(super().build(values))


def check_names(args: EngineArgs) -> EngineArgs:
    """Returns the arguments.

    Raises:
        ConfigError: there is nothing of a name that they have, or a file cannot be written.
    """
    from headrace.text.parse.recognise import check_format_names

    locate(args.model)
    check_format_names(args.tool_call_parser, args.reasoning_parser)
    if args.record_steps is not None:
        check_output(Path(args.record_steps), "record_steps")
    return args


_TOKEN = re.compile(r"<[^\s<>]+>")
"""The name of a token in a grammar, or a text that may be one in a structural tag."""


def spawn_checked(args: EngineArgs, sampling: dict[str, Any]) -> Spawned:
    """Starts an engine's process, and meanwhile checks sampling options, as far as that needs no model.

    Args:
        sampling: parameters of a command line, which hold for every prompt.

    Raises:
        RequestError: no model could serve them. Those that name tokens are left to the engine.
        EngineError: as ``spawn``.
    """
    spawned = spawn(origin=process_start())
    try:
        if sampling:
            _check(args, SamplingParams().replace(sampling))
    except BaseException:
        spawned.end()
        raise
    return spawned


def _check(args: EngineArgs, params: SamplingParams) -> None:
    from headrace.constrain.factory import GrammarFactory
    from headrace.frontend.limits import check_limits

    check_limits(params, args)
    wanted = params.structured_outputs
    if wanted is None or _names_tokens(wanted):
        return
    factory = GrammarFactory(args.structured_outputs_config, None)
    try:
        factory.constraint(wanted)
    finally:
        factory.close()


def _names_tokens(wanted: StructuredOutputsParams) -> bool:
    return _TOKEN.search(wanted.grammar or wanted.structural_tag or "") is not None


ENGINE_FIELDS: Group[EngineArgs] = Group.of(EngineArgs)
"""Engine options of commands that may run no engine; these commands call ``check_names`` themselves."""
ENGINE_OPTIONS = EngineGroup.of(EngineArgs)
SAMPLING_OPTIONS = SamplingGroup.of(SamplingParams).changed("max_tokens", default=f"{MAX_TOKENS}, within the context")
