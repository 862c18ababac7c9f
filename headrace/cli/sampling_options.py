"""Sampling options of the offline commands: one a field of SamplingParams.

They are kept as the fields that were given, because the model's own defaults come from its files and a line of an
input file may say otherwise.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from headrace.cli.options import SAMPLING as SAMPLING_PANEL
from headrace.cli.options import Group, Knob
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams


def _token_ids(text: str) -> list[int]:
    """Ids written as 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of token ids such as 11,42") from None


def _bias(text: str) -> dict[int, float]:
    """A JSON object from token id to bias."""
    try:
        value = json.loads(text)
        return {int(token): float(bias) for token, bias in value.items()}
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f'{text!r} is not a JSON object from token id to bias, such as {{"42": -5}}') from None


def _knob(field: str, help: str, **more: Any) -> Knob:
    return Knob(field, SAMPLING_PANEL, help, **more)


_KNOBS = (
    _knob("max_tokens", "Most tokens to generate for a prompt.", default="what is left of the context", metavar="INTEGER"),
    _knob("min_tokens", "Tokens before which neither the end of the sequence nor a stop counts.", metavar="INTEGER"),
    _knob("temperature", "0 takes the likeliest token; higher is freer.", default="the model's, else 1.0"),
    _knob("top_p", "Draw from the fewest tokens whose probabilities reach this sum.", default="the model's, else 1.0"),
    _knob("top_k", "Draw from this many likeliest tokens; 0: all.", default="the model's, else 0"),
    _knob("min_p", "Leave out tokens less likely than this times the likeliest.", default="the model's, else 0.0"),
    _knob("seed", "Makes the draws of a prompt repeatable.", flags=("--sampling-seed",), default="drawn from --seed"),
    _knob("n", "Samples of each prompt.", flags=("--n", "-n")),
    _knob("repetition_penalty", "Above 1: tokens of prompt and output become less likely.", default="the model's, else 1.0"),
    _knob("presence_penalty", "Taken once from the logit of each token generated so far; -2 to 2."),
    _knob("frequency_penalty", "Taken for each time a token was generated so far; -2 to 2."),
    _knob(
        "logit_bias", "Added to logits: a JSON object from token id to a number in -100 to 100.", parser=_bias, metavar="JSON"
    ),
    _knob("allowed_token_ids", "Generate these tokens alone: 11,42,...", parser=_token_ids, metavar="IDS"),
    _knob("bad_words", "A string that never appears in the output. Repeatable.", flags=("--bad-word",)),
    _knob("stop", "A string that ends the output. Repeatable."),
    _knob("include_stop_str_in_output", "Keep the stop string at the end of the text."),
    _knob("stop_token_ids", "Tokens that end the output: 11,42,...", parser=_token_ids, metavar="IDS"),
    _knob("ignore_eos", "Go on past the end of sequence, to --max-tokens. For benchmarks."),
    _knob("logprobs", "Report this many best tokens at each step, with log-probabilities; -1: the whole vocabulary."),
    _knob("logprobs_mode", "raw: of the model's logits. processed: of the distribution drawn from."),
    _knob("prompt_logprobs", "The same for the tokens of the prompt."),
    _knob("skip_special_tokens", "Leave special tokens out of the text."),
    _knob("detokenize", "Turn the output tokens into text."),
)


def check_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The given fields in the types SamplingParams keeps, once it has accepted them.

    Raises:
        RequestError: a name is not a sampling parameter, or a value is of the wrong type or out of range.
    """
    unknown = sorted(set(fields) - set(SamplingParams.__struct_fields__))
    if unknown:
        raise RequestError(f"{unknown[0]} is not a sampling parameter", unknown[0])
    try:
        checked = msgspec.convert(fields, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        # msgspec says where: "Expected `int`, got `str` - at `$.top_k`".
        message, _, place = str(error).partition(" - at `$.")
        name = re.split(r"[\[.`]", place)[0] or None
        raise RequestError(f"{name}: {message}" if name else message, name) from None
    return {name: getattr(checked, name) for name in fields}


def combine(defaults: SamplingParams, *layers: dict[str, Any]) -> SamplingParams:
    """``defaults`` overridden by each layer of checked fields in turn."""
    fields = msgspec.structs.asdict(defaults)
    for layer in layers:
        fields |= layer
    return SamplingParams(**fields)


class SamplingGroup(Group[SamplingParams]):
    """Builds the fields that were given, checked, in place of a whole SamplingParams."""

    def build(self, values: dict[str, Any]) -> Any:
        return check_fields(self.given(values))


SAMPLING = SamplingGroup(SamplingParams, _KNOBS)
