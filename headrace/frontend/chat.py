"""ChatCalls: conversations with the blocking API."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.constrain.choice import read_choice, rules_of
from headrace.errors import RequestError
from headrace.frontend.generate import Adapters, GenerateCalls, Shape
from headrace.frontend.inputs import Prompt
from headrace.frontend.progress import bar_shown
from headrace.options import shown
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.text.answers import AnswerFormats
from headrace.text.effort import EffortVariables
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.text.tools import checked_tools

Messages = list[dict[str, Any]]


class ChatCalls(GenerateCalls):
    """Generates messages of conversations."""

    @functools.cached_property
    def _templated(self) -> dict[str, Tokenizer]:
        return {}

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        thinking_token_budget: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
        progress: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation or many.

        Args:
            messages: ``[{"role": ..., "content": ...}, ...]``, or a list of such conversations.
            chat_template: a template, or the path of one, in place of the model's.
            tools: functions that the model may call, as in OpenAI's API. Answers are then parsed, where the model's format is
                known: each sample's ``message`` has the reasoning, the content and the calls, and its ``text`` the content. So
                are answers with structured output behind reasoning. Functions with ``strict`` get valid arguments.
            tool_choice, parallel_tool_calls, reasoning_effort: as in OpenAI's API.
            thinking_token_budget: tokens of reasoning at most.
            chat_template_kwargs: further variables for the template.
            mm_processor_kwargs: options of the model's processor of pictures and videos, for all conversations.
            lora_request, progress, use_tqdm: as for ``generate``.

        Raises: as ``generate``.
        """
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"messages must be a list of messages, or a list of such lists, not {shown(messages)}")
        tokenizer = self._chat_tokenizer(chat_template)
        tools = None if tools is None else checked_tools(tools)
        answers = self._answers(tokenizer)
        choice = read_choice(tool_choice, tools or ())
        if thinking_token_budget is not None and thinking_token_budget < 0:
            raise RequestError("thinking_token_budget must be a number of tokens", "thinking_token_budget")
        variables = dict(chat_template_kwargs or {})
        if reasoning_effort is not None:
            variables |= (answers.efforts if answers is not None else EffortVariables()).set_by(reasoning_effort)
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts: list[Prompt] = []
        for conversation in conversations:
            prompt = self.inputs.chat_prompt(
                conversation,
                tokenizer=tokenizer,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=variables,
                mm_processor_kwargs=mm_processor_kwargs,
                spell_tools=answers is not None and answers.spells_tools,
            )
            prompts.append(prompt)

        def shaped(prompt: Any, params: SamplingParams) -> Shape:
            if answers is None:
                return None, None
            offered = tools if tools is not None and choice.mode != "none" else []
            content = params.structured_outputs is not None
            rules = rules_of(offered, choice, content=content, parallel=parallel_tool_calls) if offered else None
            text = prompt["prompt"]
            plan = self.inputs.answer_plan(text, params, rules, budget=thinking_token_budget, answers=answers)
            parsed = offered or (plan is not None and not plan.plain)
            return answers.options(text, offered, calls=bool(offered), parallel=parallel_tool_calls) if parsed else None, plan

        return self._generate(prompts, sampling_params, bar_shown(progress, use_tqdm), shaped, lora_request)

    def _answers(self, tokenizer: Tokenizer) -> AnswerFormats | None:
        """The formats of answers to prompts that this tokenizer's template renders."""
        if tokenizer is self._engine.text.tokenizer:
            return self.inputs.answers
        return AnswerFormats(tokenizer, self.args.tool_call_parser, self.args.reasoning_parser)

    def get_tokenizer(self) -> Tokenizer:
        """Raises: RequestError with ``skip_tokenizer_init``."""
        if self._engine.text.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init)", "skip_tokenizer_init")
        return self._engine.text.tokenizer

    def _chat_tokenizer(self, chat_template: str | None) -> Tokenizer:
        tokenizer = self.get_tokenizer()
        if chat_template is None:
            return tokenizer
        if not isinstance(chat_template, str):
            raise TypeError(f"chat_template must be a string, not {shown(chat_template)}")
        if chat_template not in self._templated:
            self._templated[chat_template] = self._with_template(tokenizer, chat_template)
        return self._templated[chat_template]

    def _with_template(self, tokenizer: Tokenizer, chat_template: str) -> Tokenizer:
        if self._external is not None:
            from headrace.startup.external_model import with_template

            return with_template(tokenizer, chat_template)
        return load_tokenizer(self._engine.text.files, self.args.tokenizer, chat_template, tokenizer.renderer)
