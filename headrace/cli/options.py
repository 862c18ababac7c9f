"""Options that fill a dataclass or struct: one table a class, one option a field, nothing accepted and dropped.

A command asks for a whole group by a parameter of its function:

    @command(args=ENGINE, settings=SERVER)
    def serve(args: EngineArgs, settings: ServerSettings) -> None: ...

Options that were not given are not passed on, so that the class's own defaults (and its environment variables) apply.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar

import typer
from typer.models import ArgumentInfo

from headrace.cli.errors import reported

T = TypeVar("T")

MODEL = "Model"
CACHE = "Memory and cache"
SCHEDULING = "Scheduling"
SAMPLING = "Sampling"
LIMITS = "Sampling limits"
SERVER = "Server"
SECURITY = "Security"
DEBUGGING = "Debugging"
PANELS = (MODEL, CACHE, SCHEDULING, SAMPLING, LIMITS, SERVER, SECURITY, DEBUGGING)
"""The parts of a command's help, in their order."""

DEBUG = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error in place of its one-line message. Turn it on to report a bug.",
        rich_help_panel=DEBUGGING,
    ),
]


@dataclasses.dataclass(frozen=True)
class Knob:
    """How one field is set on the command line."""

    field: str
    panel: str
    help: str
    default: str | None = None
    """What the help shows as default; None: the field's own default value."""
    flags: tuple[str, ...] = ()
    """Replaces ``--field-name`` (a bool's is ``--field-name/--no-field-name``)."""
    parser: Callable[[str], Any] | None = None
    """From the written word to the field's value; raises ValueError."""
    metavar: str | None = None
    positional: bool = False
    envvar: str | None = None


@dataclasses.dataclass(frozen=True)
class Group(Generic[T]):
    """The options of one class. ``cls`` is called with the fields that were given."""

    cls: Callable[..., T]
    knobs: tuple[Knob, ...]

    def without(self, *fields: str) -> Group[T]:
        """The same group for a command in which these fields have no meaning."""
        unknown = set(fields) - {knob.field for knob in self.knobs}
        if unknown:
            raise ValueError(f"no such options: {sorted(unknown)}")
        return dataclasses.replace(self, knobs=tuple(knob for knob in self.knobs if knob.field not in fields))

    def renamed(self, **flags: str) -> Group[T]:
        """The same group with other flags, where another group of the command owns the name."""
        change = {field: (flag,) for field, flag in flags.items()}
        return dataclasses.replace(
            self, knobs=tuple(dataclasses.replace(k, flags=change.get(k.field, k.flags)) for k in self.knobs)
        )

    def as_options(self, *fields: str) -> Group[T]:
        """The same group with these arguments as options, where other words take the command's positions."""
        knobs = (dataclasses.replace(k, positional=False) if k.field in fields else k for k in self.knobs)
        return dataclasses.replace(self, knobs=tuple(knobs))

    def defaults(self) -> dict[str, Any]:
        """field -> its default, where it has one."""
        return _field_defaults(self.cls)

    def given(self, values: dict[str, Any]) -> dict[str, Any]:
        """What was set on the command line, by field; a repeatable option that was not used counts as not set."""
        hints = typing.get_type_hints(self.cls)
        return {
            field: tuple(value) if typing.get_origin(without_none(hints[field])) is tuple else value
            for field, value in values.items()
            if value is not None and value != []
        }

    def build(self, values: dict[str, Any]) -> T:
        return self.cls(**self.given(values))

    def parameters(self, prefix: str) -> list[inspect.Parameter]:
        """A keyword parameter a field, named ``prefix__field``, annotated for typer."""
        hints = typing.get_type_hints(self.cls)
        defaults = self.defaults()
        return [
            inspect.Parameter(
                f"{prefix}__{knob.field}",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_annotation(knob, hints[knob.field], defaults.get(knob.field)),
            )
            for knob in self.knobs
        ]


def _field_defaults(cls: Any) -> dict[str, Any]:
    """field -> its default, for dataclasses and msgspec structs."""
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
        return {
            f.name: f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            for f in fields
            if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        }
    return dict(zip(cls.__struct_fields__[-len(cls.__struct_defaults__) :], cls.__struct_defaults__, strict=True))


def _annotation(knob: Knob, hint: Any, default: Any) -> Any:
    value_type = str if knob.parser else without_none(hint)
    if typing.get_origin(value_type) is tuple:
        value_type = list[typing.get_args(value_type)[0]]  # type: ignore[misc]
    flag = "--" + knob.field.replace("_", "-")
    flags = knob.flags or ((f"{flag}/--no-{flag[2:]}",) if value_type is bool else (flag,))
    shown = knob.default if knob.default is not None else _shown(default)
    help = knob.help if shown is None else f"{knob.help} Default: {shown}."
    common: dict[str, Any] = {"help": help, "rich_help_panel": knob.panel, "show_default": False, "metavar": knob.metavar}
    if knob.parser is not None:
        common["parser"] = _checked(knob.parser)
    if knob.envvar is not None:
        common |= {"envvar": knob.envvar, "show_envvar": True}
    if knob.positional:
        return Annotated[value_type | None, typer.Argument(**common)]
    return Annotated[value_type | None, typer.Option(*flags, **common)]


def _checked(parser: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser with its ValueError as a usage error that typer prints beside the option's name."""

    @functools.wraps(parser)
    def parse(text: str) -> Any:
        try:
            return parser(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return functools.reduce(operator.or_, rest)
    return hint


def _shown(default: Any) -> str | None:
    if default is None or default == [] or default == ():
        return None
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def command(**groups: Group[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Expands each parameter named in ``groups`` into its options, adds ``--debug``, and reports errors as one line."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            if parameter.name in groups:
                parameters += groups[parameter.name].parameters(parameter.name)
            elif parameter.name != "debug":
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DEBUG)
        parameters = sorted([*parameters, debug], key=_place)

        @functools.wraps(function)
        def run(**values: Any) -> None:
            wants_debug = values["debug"]
            if "debug" not in own.parameters:
                del values["debug"]
            with reported(wants_debug):
                function(**_gathered(groups, values))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__
        return run

    return decorate


def _gathered(groups: dict[str, Group[Any]], values: dict[str, Any]) -> dict[str, Any]:
    """``prefix__field`` values gathered into one object a group."""
    result = {name: value for name, value in values.items() if "__" not in name}
    for prefix, group in groups.items():
        start = prefix + "__"
        result[prefix] = group.build({n.removeprefix(start): v for n, v in values.items() if n.startswith(start)})
    return result


def _place(parameter: inspect.Parameter) -> int:
    """Where the help shows a parameter: arguments, a command's own options, then the panels in their order."""
    (info,) = getattr(parameter.annotation, "__metadata__", (None,))
    if isinstance(info, ArgumentInfo):
        return -2
    panel = getattr(info, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else -1


def positive_int(text: str) -> int:
    """A count of at least one."""
    value = int(text) if text.strip().lstrip("+-").isdigit() else 0
    if value < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return value


def int_or_auto(text: str) -> int | Literal["auto"]:
    """A count of at least one, or the word auto."""
    if text == "auto":
        return "auto"
    try:
        return positive_int(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a whole number of at least 1 nor 'auto'") from None
