"""Declared parameters: type, range, default and help of a parameter stand once, at the field that holds its value.

    temperature: Annotated[float, OptionSpec(min=0.0, max=FLOAT32_MAX)] = 1.0
    "Divides the logits before sampling."

The check, the command line, the HTTP schema and the tables of the documentation read this declaration through ``options``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, dataclass_transform

import msgspec

from headrace.errors import ConfigError, RequestError, did_you_mean

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126
"""The smallest normal float32."""
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

Endpoint = Literal["chat", "completions", "messages", "count_tokens", "responses", "generate", "inference"]
Origin = Literal["OpenAI", "Codex", "Anthropic", "vLLM", "SGLang", "llama.cpp", "headrace"]
"""The API that a request field comes from."""


def api(origin: Origin, *endpoints: Endpoint) -> dict[Endpoint, Origin]:
    """``OptionSpec.apis`` of a field; its endpoints are chat and completions where none is named."""
    return dict.fromkeys(endpoints or ("chat", "completions"), origin)


_MAX_LABEL, _MAX_LABELS = 64, 16
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", Path: "path"}
_NAMED = {INT32_MAX: "2^31 - 1", INT64_MAX: "2^63 - 1", -INT64_MAX - 1: "-2^63", FLOAT32_MAX: "3.4e38", FLOAT32_TINY: "1.2e-38"}
"""Bounds as the documentation writes them."""

WHAT = "What is measured"
HOW = "How it is measured"
PROMPTS = "Prompts and results"
REPORT = "Report"
MODEL = "Model"
CACHE = "Memory and cache"
SCHEDULING = "Scheduling"
MEDIA = "Pictures and videos"
SAMPLING = "Sampling"
LIMITS = "Sampling limits"
SERVER = "Server"
CONVERSATION = "Conversation"
SECURITY = "Security"
DEBUGGING = "Debugging"
PANELS = (
    *(WHAT, HOW, PROMPTS, REPORT, MODEL, CACHE, SCHEDULING, MEDIA, SAMPLING, LIMITS),
    *(SERVER, CONVERSATION, SECURITY, DEBUGGING),
)
"""Sections of a command's help, in their order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """Declares one parameter. Its name, type and default are those of the field it annotates, its help the string below.

    ``min`` and ``max`` are inclusive, ``above`` is an exclusive minimum. They bound a number, each number of a list or of a
    dict's values, and the length of a string or of each string in a list.
    """

    min: float | None = None
    max: float | None = None
    above: float | None = None
    empty: bool = True
    """Whether a list may be empty."""
    default: str | None = None
    """The default in words, where the field's own value does not tell it."""
    flags: tuple[str, ...] = ()
    """Command-line flags in place of ``--field-name`` (for a bool ``--field-name/--no-field-name``)."""
    metavar: str | None = None
    positional: bool = False
    single: bool = False
    """JSON may hold a string alone instead of a list of one."""
    secret: bool = False
    """The value is never shown."""
    size: bool = False
    """A number of bytes, which the command line takes as ``2GiB`` too."""
    schema: Mapping[str, Any] | None = None
    """JSON Schema of the values, where the type does not tell it."""
    hints: Mapping[str, str] | None = None
    """Words that other engines take in place of one of these values, in lower case, and what to write here."""
    labels: bool = False
    """An object of at most 16 entries whose keys have at most 64 characters."""
    apis: Mapping[Endpoint, Origin] = dataclasses.field(default_factory=dict)
    """HTTP endpoint that takes the parameter -> the API that it comes from."""

    @property
    def bounds(self) -> str:
        """The accepted range: ``[0.0, 1.0]``, ``(0.0, 1.0]`` where the minimum is exclusive, ``of at least 1``."""
        if self.max is None:
            return f"of at least {self.min}" if self.above is None else f"above {self.above}"
        return f"in ({self.above}, {self.max}]" if self.above is not None else f"in [{self.min}, {self.max}]"

    def admits(self, number: float) -> bool:
        """False for NaN. Python compares integers of any size with floats exactly."""
        return (
            (self.min is None or number >= self.min)
            and (self.above is None or number > self.above)
            and (self.max is None or number <= self.max)
            and number == number
        )


class InvalidValueError(ValueError):
    """A value that its declaration does not admit. ``param`` is the parameter, or the item of it, at fault."""

    def __init__(self, message: str, param: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        """``invalid_type`` or ``invalid_value``."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A declared parameter with the name, type and default of its field."""

    owner: Any
    """The class that declares it."""
    name: str
    spec: OptionSpec
    type: Any
    """Without None."""
    optional: bool
    """None is a value."""
    default: Any = None
    """dataclasses.MISSING: there is none, or a factory makes it."""
    factory: Any = None

    @property
    def default_value(self) -> Any:
        return self.default if self.factory is None else self.factory()

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING and self.factory is None

    @property
    def environment(self) -> str | None:
        """The environment variable that gives the field's default where it is set."""
        field = getattr(self.owner, "__dataclass_fields__", {}).get(self.name)
        return None if field is None else field.metadata.get("environment")

    @property
    def key(self) -> str:
        """Name in a configuration file: the long option without its dashes in front."""
        return self.spec.flags[0].removeprefix("--") if self.spec.flags else self.name.replace("_", "-")

    @property
    def help(self) -> str:
        return _helps(self.owner)[self.name]

    @property
    def panel(self) -> str:
        """The panel of the last field, up to this one, that starts one; ``panels`` of the class says which do."""
        starts = getattr(self.owner, "panels", {})
        names = list(options(self.owner))
        return next((starts[name] for name in reversed(names[: names.index(self.name) + 1]) if name in starts), SAMPLING)

    @property
    def accepts(self) -> str:
        """Type and range for the documentation."""
        kind, spec = self.type, self.spec
        arguments = typing.get_args(kind)
        if arguments and typing.get_origin(kind) is not Literal:
            kind = arguments[1 if typing.get_origin(kind) is dict else 0]
        if is_declared(kind) or self.spec.schema is not None:
            return "object of " + ", ".join(options(kind)) if is_declared(kind) else "JSON"
        words = _KINDS[kind] if kind in _KINDS else " or ".join(typing.get_args(kind))
        low = spec.min if spec.above is None else spec.above
        if kind in (int, float) and low is not None:
            end = "inf)" if spec.max is None else f"{_NAMED.get(spec.max, spec.max)}]"
            words += f" in {'[' if spec.above is None else '('}{_NAMED.get(low, low)}, {end}"
        wrapped = {list: f"list of {words}", tuple: f"tuple of {words}", dict: f"dict of int to {words}"}
        return wrapped.get(typing.get_origin(self.type), words)

    def check(self, value: Any) -> None:
        """Raises: InvalidValueError: the value is of another type or out of range."""
        if value is not None or not self.optional:
            self._check(self.type, value, self.name)

    def _check(self, hint: Any, value: Any, where: str) -> None:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            if not is_one_of(value, arguments):
                raise _invalid(where, "one of " + ", ".join(map(repr, arguments)), value, hint=self._hint(value, arguments))
        elif origin in (list, tuple):
            self._check_items(origin, arguments[0], value, where)
        elif origin is dict and arguments[0] is int:
            self._check_biases(value, where)
        elif origin is dict:
            self._check_object(arguments[0], arguments[1], value, where)
        elif hint is Any:
            return
        elif origin in (typing.Union, types.UnionType):  # with words, or with None
            if not is_one_of(value, typing.get_args(arguments[1]) or [None]):
                self._check(arguments[0], value, where)
        elif hint is bool:
            if not isinstance(value, bool):
                raise _invalid(where, "True or False", value, "invalid_type")
        elif hint in (int, float):
            self._check_number(hint, value, where)
        elif hint is str:
            self._check_string(value, where)
        elif hint is Path and not isinstance(value, (str, Path)):
            raise _invalid(where, "a path", value, "invalid_type")
        elif is_declared(hint) and not isinstance(value, hint):
            raise _invalid(where, f"an object of {', '.join(options(hint))}", value, "invalid_type")

    def _hint(self, value: Any, choices: Iterable[Any]) -> str:
        """Returns a suggestion in place of a word that is none of the values; empty where nothing is near."""
        if not isinstance(value, str):
            return ""
        known = (self.spec.hints or {}).get(value.lower())
        return did_you_mean(value, [each for each in choices if isinstance(each, str)]) if known is None else f": {known}"

    def _check_number(self, hint: Any, value: Any, where: str) -> None:
        kind = "an integer" if hint is int else "a number"
        of_type = type(value) is int or (hint is float and isinstance(value, float))
        if not of_type or not self.spec.admits(value):
            raise _invalid(where, f"{kind} {self.spec.bounds}", value, "invalid_value" if of_type else "invalid_type")

    def _check_string(self, value: Any, where: str) -> None:
        if not isinstance(value, str):
            raise _invalid(where, "a string", value, "invalid_type")
        if not self.spec.admits(len(value)):
            lengths = f"{self.spec.min} to {self.spec.max}" if self.spec.max is not None else f"at least {self.spec.min}"
            raise _invalid(where, f"a string of {lengths} characters", value)
        if not _is_utf8(value):
            raise _invalid(where, "text without lone surrogates", value)

    def _check_items(self, kind: Any, item: Any, value: Any, where: str) -> None:
        if not isinstance(value, kind):
            raise _invalid(where, f"a {kind.__name__}", value, "invalid_type")
        if not value and not self.spec.empty:
            raise _invalid(where, "a list of at least one entry", value)
        if item in (int, str) and set(map(type, value)) == {item} and self._admits_all(value):
            return
        for index, entry in enumerate(value):
            self._check(item, entry, f"{where}[{index}]")

    def _admits_all(self, values: list[Any]) -> bool:
        """Whether each of the integers or strings is admitted, without a call for each: clients send lists of thousands, for
        which the event loop waits."""
        sizes = list(map(len, values)) if isinstance(values[0], str) else values
        if not self.spec.admits(min(sizes)) or not self.spec.admits(max(sizes)):
            return False
        return sizes is values or _is_utf8("".join(values))

    def _check_object(self, key_type: Any, item: Any, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _invalid(where, "an object", value, "invalid_type")
        if self.spec.labels and (len(value) > _MAX_LABELS or max(map(len, value), default=0) > _MAX_LABEL):
            raise _invalid(
                where, f"an object of at most {_MAX_LABELS} entries by names of up to {_MAX_LABEL} characters", value
            )
        for key, entry in value.items() if item is not Any else ():
            self._check(key_type, key, f"a key of {where}")
            self._check(item, entry, f"{where}.{shown(key)[1:-1]}")

    def _check_biases(self, value: Any, where: str) -> None:
        """Token id -> number."""
        if not isinstance(value, dict):
            raise _invalid(where, "an object from token id to number", value, "invalid_type")
        for key, number in value.items():
            if type(key) is not int or not 0 <= key <= INT32_MAX:
                raise InvalidValueError(f"{where} has the key {shown(key)}: keys are token ids", self.name, "invalid_value")
            try:
                self._check(float, number, f"{where} of token {key}")
            except InvalidValueError as error:
                raise InvalidValueError(error.message, self.name, error.code) from None

    def from_json(self, value: Any) -> Any:
        """A JSON value in the field's type where JSON has no such type: object keys as token ids, one string as a list."""
        if self.spec.single and isinstance(value, str):
            return [value]
        if self.type == dict[int, float] and isinstance(value, dict):
            return {int(k) if isinstance(k, str) and _is_token_id(k) else k: v for k, v in value.items()}
        if is_declared(self.type) and isinstance(value, dict):
            return nested(self.type, value, self.name)
        return value

    def json_schema(self) -> dict[str, Any]:
        """JSON Schema of the values."""
        schema = self._schema(self.type) | {"description": self.help}
        if self.spec.single:
            schema = {"anyOf": [{"type": "string"}, schema]}
        return schema

    def _schema(self, hint: Any) -> dict[str, Any]:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if self.spec.schema is not None:
            return dict(self.spec.schema)
        if is_declared(hint):
            properties = {name: option.json_schema() for name, option in options(hint).items()}
            return {"type": "object", "properties": properties, "additionalProperties": False}
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is list:
            return {"type": "array", "items": self._schema(arguments[0]), **({} if self.spec.empty else {"minItems": 1})}
        if hint is Any:
            return {}
        if origin is dict:
            return {"type": "object", "additionalProperties": self._schema(arguments[1])}
        if hint is str:
            bounds = {"minLength": self.spec.min, "maxLength": self.spec.max}
        else:
            bounds = {"minimum": self.spec.min, "maximum": self.spec.max, "exclusiveMinimum": self.spec.above}
        kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
        return {"type": kinds[hint], **{name: bound for name, bound in bounds.items() if bound is not None}}


def is_one_of(value: Any, admitted: Iterable[Any]) -> bool:
    """Equality of type and value: 0 is not False."""
    return any(type(value) is type(each) and value == each for each in admitted)


def is_declared(hint: Any) -> bool:
    """Whether a type is a class of declared fields itself: a msgspec struct or a dataclass."""
    return isinstance(hint, type) and (hasattr(hint, "__struct_fields__") or dataclasses.is_dataclass(hint))


def nested(cls: Any, fields: Mapping[str, Any], where: str) -> Any:
    """An instance of a class of declared fields from a JSON object, in which null counts as left out.

    Raises:
        RequestError, ConfigError: as ``cls`` raises, naming the field within ``where``; a name is not a field of ``cls``.
    """
    try:
        return cls(**from_json(cls, {name: value for name, value in fields.items() if value is not None}))
    except (RequestError, ConfigError) as error:
        error.param = f"{where}.{error.param}" if error.param else where
        raise


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10


def _is_utf8(text: str) -> bool:
    """False: the text holds lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _invalid(where: str, accepted: str, value: Any, code: str = "invalid_value", hint: str = "") -> InvalidValueError:
    return InvalidValueError(f"{where} must be {accepted}, not {shown(value)}{hint}", where, code)


def shown(value: Any, limit: int = 64) -> str:
    """A value in an error message, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 10**limit:
        return f"an integer of {int(math.log10(2) * value.bit_length())} digits"
    if isinstance(value, (str, bytes, list, tuple)):
        value = value[: limit + 1]  # written in full, a megabyte of text would be shown to be cut
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


@functools.cache
def options(cls: Any) -> Mapping[str, Option]:
    """The fields of a dataclass or msgspec struct, by name, in their order. A field needs no OptionSpec."""
    found, defaults = {}, _defaults(cls)
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        metadata = getattr(hint, "__metadata__", ())
        spec = next((each for each in metadata if isinstance(each, OptionSpec)), OptionSpec())
        declared = hint.__origin__ if metadata else hint
        plain = without_none(declared)
        if spec.max is None and int in (plain, *typing.get_args(plain)[:1]):
            spec = dataclasses.replace(spec, max=INT64_MAX)  # what a message between processes holds
        found[name] = Option(cls, name, spec, plain, plain != declared, *defaults[name])
    return found


@functools.cache
def _helps(cls: Any) -> dict[str, str]:
    """Field -> the string below it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if vars(base).get("__annotations__"):
            found |= _strings(inspect.getfile(base))[base.__name__]
    return found


@functools.cache
def _strings(file: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the string below it, read from a source file: Python keeps none of these strings."""
    module = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {
        declared.name: {
            ast.unparse(field.target): " ".join(str(below.value.value).split())
            for field, below in itertools.pairwise(declared.body)
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        }
        for declared in module.body
        if isinstance(declared, ast.ClassDef)
    }


def _defaults(cls: Any) -> dict[str, tuple[Any, Any]]:
    """Field -> its default and its default factory."""
    fields: Iterable[Any]
    missing: Any
    if dataclasses.is_dataclass(cls):
        fields, missing = cls.__dataclass_fields__.values(), dataclasses.MISSING
    else:
        fields, missing = msgspec.structs.fields(cls), msgspec.NODEFAULT
    return {
        field.name: (
            dataclasses.MISSING if field.default is missing else field.default,
            None if field.default_factory is missing else field.default_factory,
        )
        for field in fields
    }


def from_environment(variable: str, default: int) -> Any:
    """A field whose default is the environment variable's value where it is set.

    Its factory raises ConfigError if the value is not an integer.
    """

    def read() -> int:
        given = os.environ.get(variable, "").strip()
        try:
            return int(given) if given else default
        except ValueError:
            raise ConfigError(f"the environment's {variable} must be a whole number, not {given!r}", variable) from None

    return dataclasses.field(default_factory=read, metadata={"environment": variable})


def without_none(hint: Any) -> Any:
    """``int | None`` -> ``int``"""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return functools.reduce(operator.or_, rest)
    return hint


def check(instance: Any, error: type[RequestError] | type[ConfigError]) -> None:
    """Checks every declared field of ``instance`` that is not its default. Raises ``error``, naming the field.

    An integer in a field of floats becomes a float: a message between processes holds integers of 64 bits.
    """
    cls: Any = type(instance)
    for name, option in options(cls).items():
        value = getattr(instance, name)
        if value is not option.default:
            check_value(option, value, error)
            if option.type is float and type(value) is int:
                replace = msgspec.structs.force_setattr if isinstance(instance, msgspec.Struct) else object.__setattr__
                replace(instance, name, float(value))


class CheckedType(type):
    """Metaclass of declared classes: calling the class checks the instance with its ``validate``.

    Decoding a message and unpickling do not call the class: the sender has checked what travels between processes.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        instance = super().__call__(*args, **fields)
        instance.validate()
        return instance


@dataclass_transform(frozen_default=True, kw_only_default=True)
class CheckedStructType(CheckedType, msgspec.StructMeta):
    """``CheckedType`` of msgspec structs."""


class Checked(metaclass=CheckedType):
    """Base of dataclasses of declared fields.

    Raises:
        ConfigError: a value is of another type or out of range; the error names the field.
    """

    def validate(self) -> None:
        """Checks the fields, alone and together."""
        check(self, ConfigError)


def check_value(option: Option, value: Any, error: type[RequestError] | type[ConfigError]) -> None:
    """Raises ``error`` where the option does not admit the value."""
    try:
        option.check(value)
    except InvalidValueError as invalid:
        if error is ConfigError:
            raise ConfigError(invalid.message, option.name) from None
        # An item is named by its index, but for strings, whose text the message has.
        strings = typing.get_args(option.type)[:1] == (str,)
        raise RequestError(invalid.message, option.name if strings else invalid.param, code=invalid.code) from None


def from_json(cls: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as JSON has them, in the types of ``cls``; what cannot be converted is left for the check to refuse.

    Raises:
        RequestError: a name is not a parameter of ``cls``; ConfigError where that is a dataclass, whose checks raise it too.
    """
    known = options(cls)
    if unknown := sorted(fields.keys() - known.keys()):
        message = f"{shown(unknown[0])[1:-1]} is not a parameter{did_you_mean(unknown[0], known)}"
        if dataclasses.is_dataclass(cls):
            raise ConfigError(message, unknown[0])
        raise RequestError(message, unknown[0], code="unknown_parameter")
    return {name: known[name].from_json(value) for name, value in fields.items()}
