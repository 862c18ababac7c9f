"""OpenAI's Responses over HTTP, streaming and not."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from support.server import scripted
from support.server.fakes import FakeLLM
from support.server.grammars import folded_responses, named_events
from support.server.harness import Api, error, running
from support.server.scripted import ScriptedLLM, Scripts

from headrace.errors import EngineError
from headrace.server.settings import ServerSettings
from headrace.server.store import ResponseStore, StoredItem
from headrace.text.tokenizer import Tokenizer
from headrace.text.transcript import Transcript

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
OTHER = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BOTH = f'<think>\nsums, ü\n</think>\n\nLet me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
URL = "/v1/responses"


def answered(make: Scripts, *texts: str, **fields: Any) -> dict[str, Any]:
    """The response, which is the same streamed and not; ids apart, which are another request's."""
    body = {"input": "Hi", "include": ["reasoning.encrypted_content"], **fields}
    whole = make(*texts).post(URL, body)
    assert whole.status_code == 200, whole.text
    streamed = folded_responses(named_events(make(*texts).post(URL, body | {"stream": True})))
    response: dict[str, Any] = whole.json()
    for one in (response, streamed):
        assert one["id"].startswith("resp_") and one.pop("created_at") > 0
        one.pop("completed_at"), one.pop("id")
        for item in one["output"]:
            prefix = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}[item["type"]]
            assert item.pop("id").startswith(prefix)
            item.pop("call_id", None)
            if item["type"] == "reasoning":
                assert item.pop("encrypted_content")
    assert response == streamed
    return response


def test_reasoning_text_and_calls(scripts: Scripts) -> None:
    response = answered(scripts, BOTH, tools=[TOOL, OTHER])
    reasoning, message, add, now = response["output"]
    assert (reasoning["content"], reasoning["summary"]) == ([{"type": "reasoning_text", "text": "sums, ü"}], [])
    assert message["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert (add["name"], json.loads(add["arguments"]), add["status"]) == ("add", {"a": 1, "b": 2}, "completed")
    assert now["name"] == "now" and response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert set(response["usage"]["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
    assert len(answered(scripts, BOTH, tools=[TOOL, OTHER], parallel_tool_calls=False)["output"]) == 3


def test_what_max_output_tokens_cuts_is_incomplete(scripts: Scripts) -> None:
    for text, limit in ((CALL, 40), ("one two", 3), ("<think>one two", 5)):
        response = answered(scripts, text, tools=[TOOL], max_output_tokens=limit)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in response["output"]] == ["incomplete"]


def patch_tool(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"tools": [{"type": "custom", "name": "patch", "format": grammar}]}


def test_the_text_of_a_custom_tool_streams_as_it_comes(scripts: Scripts) -> None:
    text = 'a "b"\n\\ü 😀\x01'
    call = "<tool_call>\n" + json.dumps({"name": "patch", "arguments": {"input": text}}) + "\n</tool_call>"
    body = {"input": "Hi", "stream": True, "tools": [{"type": "custom", "name": "patch"}]}
    found = named_events(scripts(call).post(URL, body))
    deltas = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text and len(deltas) > 5
    assert found[-1]["response"]["output"][0]["input"] == text


def test_custom_tools_get_one_string(scripts: Scripts) -> None:
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\n"}}\n</tool_call>'
    response = answered(scripts, call, tools=[{"type": "custom", "name": "patch", "description": "Edits."}])
    assert response["output"] == [{"type": "custom_tool_call", "name": "patch", "input": 'a "b"\n'}]
    server = scripts("x")
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    assert server.post(URL, {"input": items}).status_code == 200
    prompt = server.llm.seen[-1].prompt or ""
    assert '{"name": "patch", "arguments": {"input": "x"}}' in prompt and "tool\ndone" in prompt


def test_logprobs_belong_to_the_text(scripts: Scripts) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 0}
    message = answered(scripts, "<think>x</think>ü é", **fields)["output"][1]
    entries = message["content"][0]["logprobs"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == message["content"][0]["text"]


def test_the_response_repeats_the_request(scripts: Scripts) -> None:
    given = {
        "instructions": "Be brief.",
        "metadata": {"run": "7"},
        "user": "me",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}},
        "store": False,
        "prompt_cache_key": "k",
    }
    assert answered(scripts, "x", **given).items() >= given.items()


def test_a_conversation_goes_on_from_the_store(scripts: Scripts) -> None:
    server = scripts(BOTH, "It is 3.", "end")

    async def many(http: Any) -> list[Any]:
        first = (await http.post(URL, json={"input": "1 + 2?", "tools": [TOOL, OTHER], "instructions": "Be brief."})).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "3"} for call in calls]
        body = {"input": results, "previous_response_id": first["id"], "tools": [TOOL, OTHER], "stream": True}
        second = folded_responses(named_events(await http.post(URL, json=body)))
        again = (await http.get(f"{URL}/{second['id']}")).json()
        items = (await http.get(f"{URL}/{second['id']}/input_items", params={"order": "asc", "limit": 1})).json()
        reference = {
            "input": [{"type": "item_reference", "id": second["output"][0]["id"]}, {"role": "user", "content": "and?"}]
        }
        third = await http.post(URL, json=reference)
        cancelled = await http.post(f"{URL}/{second['id']}/cancel", json={})
        deleted = (await http.delete(f"{URL}/{second['id']}")).json()
        gone = await http.get(f"{URL}/{second['id']}")
        lost = await http.post(URL, json={"input": "x", "previous_response_id": second["id"]})
        return [second, again, items, third, cancelled, deleted, gone, lost, results]

    second, again, items, third, cancelled, deleted, gone, lost, results = with_client(server, many)
    assert again == second and second["instructions"] is None
    assert len(items["data"]) == 1 and items["has_more"] and items["data"][0].items() >= results[0].items()
    assert third.status_code == 200
    assert error(cancelled)["param"] == "response_id" and deleted["deleted"]
    error(gone, 404)
    assert error(lost, 404)["param"] == "previous_response_id"
    prompts = [request.prompt or "" for request in server.llm.seen]
    assert "Be brief." in prompts[0] and "Be brief." not in prompts[1]
    head = "<|im_start|>user\n1 + 2?<|im_start|>assistant\n<think>sums, ü</think>Let me see."
    assert head in prompts[1] and prompts[1].count("<tool_call>") == 2 and prompts[1].count("<|im_start|>tool\n3") == 2
    assert "<|im_start|>assistant\nIt is 3.<|im_start|>user\nand?" in prompts[2]


def with_client(server: Api, work: Callable[[Any], Any]) -> Any:
    """Several requests to one app."""
    import asyncio

    from support.server.harness import client

    async def run() -> Any:
        async with client(server.llm, server.settings) as http:
            return await work(http)

    return asyncio.run(run())


def test_sealed_reasoning_comes_back_to_its_server_only(scripts: Scripts) -> None:
    server = scripts("<think>secret</think>Yes.", "x")

    async def loop(http: Any) -> Any:
        body = {"input": "Hi", "store": False, "include": ["reasoning.encrypted_content"]}
        reasoning, message = (await http.post(URL, json=body)).json()["output"]
        del reasoning["content"]
        again = await http.post(URL, json=body | {"input": [reasoning, message, {"role": "user", "content": "so?"}]})
        assert again.status_code == 200, again.text
        return reasoning

    reasoning = with_client(server, loop)
    assert "<think>secret</think>Yes." in (server.llm.seen[-1].prompt or "")
    for seal in (reasoning["encrypted_content"], "x", "AAAA", "é"):
        assert error(scripts("x").post(URL, {"input": [reasoning | {"encrypted_content": seal}]}))["param"] == "input"


def test_the_store_can_be_off() -> None:
    server = Api(FakeLLM(), ServerSettings(responses_store=False))
    assert "--no-responses-store" in error(server.post(URL, {"input": "x", "store": True}))["message"]
    kept = server.post(URL, {"input": "x"}).json()
    assert kept["store"] is False


def test_the_store_stays_in_its_bounds() -> None:
    now = [0.0]
    settings = ServerSettings(responses_store_entries=50, responses_store_bytes=40_000, responses_store_ttl=1000)
    store = ResponseStore(settings, lambda: now[0])

    def put(identity: str, items: list[StoredItem], *output: StoredItem, transcript: Transcript | None = None) -> None:
        store.begin("", identity, (), tuple(items))
        assert store.get("", identity) is None
        store.finish("", identity, b"{}", output, transcript)

    for number in range(20_000):
        now[0] += number % 7
        item = StoredItem(f"item_{number}", b"x" * (number * 37 % 997))
        transcript = Transcript(b"x" * (number * 41 % 997), array("i", range(number % 53))) if number % 3 else None
        put(f"resp_{number}", [item], StoredItem(f"msg_{number}", b""), transcript=transcript)
        store.get("", "resp_0")
        assert len(store) <= 50 and store.used("") <= 40_000
        shelf = store._shelves[""]
        assert len(shelf.of_item) == 2 * len(store) == 2 * len(shelf.entries) == 2 * len(shelf.sizes)
    assert store.get("", f"resp_{number}") and store.item("", f"item_{number}") == item
    assert store.get("", "resp_0") is None
    for large, transcript in (StoredItem("i", b"x" * 50_000), None), (item, Transcript(b"", array("i", range(10_000)))):
        put("large", [large], transcript=transcript)
    assert store.get("", "large") is None and store.used("") == 0
    put("old", [])
    store.begin("", "abandoned", (), (item,))
    store.abandon("", "abandoned")
    store.abandon("", "old")
    assert len(store) == 1
    now[0] += 1000
    assert store.get("", "old") is None and len(store) == 0


def test_each_key_has_its_own_share_of_the_store() -> None:
    settings = ServerSettings(responses_store_entries=4, api_keys=("a", "b"))
    store = ResponseStore(settings)
    for tenant, count in ("a", 1), ("b", 9):
        for number in range(count):
            store.begin(tenant, f"{tenant}{number}", (), (StoredItem("same", tenant.encode()),))
            store.finish(tenant, f"{tenant}{number}", b"{}", ())
    assert store.get("a", "a0") and not store.get("b", "a0") and not store.delete("b", "a0")
    assert [store.get("b", f"b{number}") is not None for number in range(9)] == 7 * [False] + 2 * [True]
    assert store.item("a", "same") == StoredItem("same", b"a") and store.item("b", "same") == StoredItem("same", b"b")


def test_a_response_does_not_exist_for_another_key(made: Tokenizer) -> None:
    server = Api(ScriptedLLM(made, ["One.", "Two."]), ServerSettings(api_keys=("a", "b")))
    [mine, other] = [{"Authorization": f"Bearer {key}"} for key in "ab"]

    async def both(http: Any) -> None:
        first = (await http.post(URL, json={"input": "Hi"}, headers=mine)).json()
        identity, item = first["id"], first["output"][0]["id"]
        asked: list[tuple[str, str, Any]] = [
            ("GET", f"{URL}/{{}}", None),
            ("DELETE", f"{URL}/{{}}", None),
            ("GET", f"{URL}/{{}}/input_items", None),
            ("POST", f"{URL}/{{}}/cancel", None),
            ("POST", URL, {"input": "x", "previous_response_id": "{}"}),
            ("POST", URL, {"input": [{"type": "item_reference", "id": "{}"}]}),
        ]
        for method, url, body in asked:
            name = item if body and isinstance(body["input"], list) else identity
            answers = []
            for given in (name, "unknown"):
                fields = body and json.loads(json.dumps(body).replace("{}", given))
                answer = await http.request(method, url.format(given), json=fields, headers=other)
                assert answer.status_code == 404, (method, url, answer.text)
                answers.append(answer.text.replace(given, ""))
            assert answers[0] == answers[1]
        assert (await http.get(f"{URL}/{identity}", headers=mine)).status_code == 200
        again = {"input": [{"type": "item_reference", "id": item}], "previous_response_id": identity}
        assert (await http.post(URL, json=again, headers=mine)).status_code == 200

    with_client(server, both)


def test_requests_that_fail_leave_nothing_in_the_store() -> None:
    server = Api(FakeLLM(script=lambda request, index: [EngineError("lost")]))  # type: ignore[list-item]

    async def failed(http: Any) -> None:
        state = http._transport.app.state.serving
        for stream in (False, True):
            assert (await http.post(URL, json={"input": "x", "stream": stream})).status_code == 500
            assert len(state.responses) == 0

    with_client(server, failed)


def test_references_cost_what_the_items_would_in_the_body(made: Tokenizer) -> None:
    """Items of which the prompt has little and the store much."""
    settings = ServerSettings(max_body_bytes=2**20)
    server = Api(ScriptedLLM(made, ["Yes."]), settings)
    part = {"type": "output_text", "text": "y", "annotations": ["y" * 30_000]}
    long = [{"role": "assistant", "content": [part], "id": f"i{index}"} for index in range(20)]

    async def refer(http: Any) -> Any:
        stored = (await http.post(URL, json={"input": long, "max_output_tokens": 4})).json()
        assert stored["object"] == "response", stored
        few = [{"type": "item_reference", "id": "i3"}]
        many = await http.post(URL, json={"input": 40 * few, "store": False})
        taken = await http.post(URL, json={"input": 4 * few, "store": False})
        longer = {"input": 20 * few, "previous_response_id": stored["id"]}
        return many, taken, await http.post(URL, json=longer)

    many, taken, longer = with_client(server, refer)
    assert error(many, 413)["param"] == "input" and "(max_body_bytes)" in many.json()["error"]["message"]
    assert error(longer, 413)["param"] == "previous_response_id"
    assert taken.status_code == 200 and len(server.llm.seen[-1].prompt or "") < 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "lost", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0].type"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "mcp_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour"),
        ({"input": [{"type": "reasoning", "summary": [], "content": [{"role": "user"}]}]}, "input[0].content[0].role"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0]"),
        ({"tools": [{"type": ["x"]}]}, "tools[0]"),
        ({"tools": [TOOL | {"paramters": {}}]}, "tools[0].paramters"),
        ({"tools": [{"type": "web_search"}, TOOL | {"strickt": True}]}, "tools[1].strickt"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, {"type": "function", "name": "?"}]}]},
            "tools[0].tools[1].name",
        ),
        ({"tools": [TOOL | {"allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        (patch_tool("gbnf", "x"), "tools[0].format.syntax"),
        (patch_tool("lark", "start: nowhere"), "tools[0].format.definition"),
        (patch_tool("lark", "start: /a/i"), "tools[0].format.definition"),
        (patch_tool("lark", f'start: "{"x" * 2**20}"'), "tools[0].format.definition"),
        (patch_tool("regex", "a(?=b)"), "tools[0].format.definition"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["x"]}, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "gigantic"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "x"}}, "reasoning.summary"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(scripts: Scripts, fields: dict[str, Any], param: str) -> None:
    server = scripts("x")
    found = error(server.post(URL, {"input": "Hi", **fields}))
    assert found["param"] == param
    assert f"{param}: {param}" not in found["message"]
    assert not server.llm.seen


def test_tools_of_the_server_are_skipped_unless_it_refuses_them(scripts: Scripts) -> None:
    for which, others, skipped in (("auto", [{"type": "mcp"}], "web_search, mcp"), ("skip", [{"type": "x"}], "web_search, x")):
        server = scripts(CALL, settings=ServerSettings(unsupported_tools=which))  # type: ignore[arg-type]
        allowed = {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "web_search"}, {"type": "function", "name": "add"}],
        }
        fields = {"input": "Hi", "tools": [{"type": "web_search"}, TOOL, *others], "tool_choice": allowed}
        response = server.post(URL, fields).json()
        assert response["metadata"] == {"skipped_tools": skipped} and response["tools"] == [TOOL]
        assert response["output"][0]["type"] == "function_call"
    refused = scripts(CALL, settings=ServerSettings(unsupported_tools="refuse")).post(URL, fields)
    assert "--unsupported-tools auto" in error(refused)["message"]


def namespace(*tools: dict[str, Any], name: str = "mcp__github") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "Repositories.", "tools": list(tools)}


def test_tools_of_namespaces_keep_their_names(scripts: Scripts) -> None:
    """The model is shown one name; the client gets two, and sends them back."""
    tools = [namespace(TOOL, {"type": "custom", "name": "patch"}), TOOL | {"description": "Another."}]
    call = '<tool_call>\n{"name": "mcp__github__%s", "arguments": %s}\n</tool_call>'
    text = call % ("add", '{"a": 1, "b": 2}') + "\n" + call % ("patch", '{"input": "x"}') + f"\n{CALL}"
    response = answered(scripts, text, tools=tools)
    member, custom, plain = response["output"]
    assert (member["name"], member["namespace"], plain["name"]) == ("add", "mcp__github", "add") and "namespace" not in plain
    assert custom.items() >= {"type": "custom_tool_call", "name": "patch", "namespace": "mcp__github", "input": "x"}.items()
    assert response["tools"] == tools
    server = scripts("x")
    results = [{"type": "function_call_output", "call_id": "c1", "output": "3"}]
    history = [{**member, "call_id": "c1"}, *results, {**custom, "call_id": "c2"}]
    results = [{"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}]
    choice = {"type": "function", "name": "add", "namespace": "mcp__github"}
    assert server.post(URL, {"input": [*history, *results], "tools": tools, "tool_choice": choice}).status_code == 200
    prompt = server.llm.seen[-1].prompt or ""
    assert prompt.count('"mcp__github__add"') == prompt.count('"mcp__github__patch"') == 2
    assert prompt.count("Repositories.") == 1


def test_long_names_of_namespaces_end_in_a_digest(scripts: Scripts) -> None:
    server = scripts("x")
    long = namespace(TOOL | {"name": "y" * 30}, TOOL | {"name": "y" * 30 + "z"}, name="n" * 40)
    assert server.post(URL, {"input": "Hi", "tools": [long]}).status_code == 200
    first, second = re.findall('"name": "([^"]*)"', server.llm.seen[-1].prompt or "")
    assert first[:55] == second[:55] and first != second and len(first) == len(second) == 64
    (call,) = answered(scripts, CALL.replace("add", first), tools=[long])["output"]
    assert (call["name"], call["namespace"]) == ("y" * 30, "n" * 40)


def test_additional_tools_join_the_others(scripts: Scripts) -> None:
    items = [{"type": "additional_tools", "role": "developer", "tools": [OTHER]}, {"role": "user", "content": "Hi"}]
    response = answered(scripts, BOTH, tools=[TOOL], input=items)
    assert [item.get("name") for item in response["output"][2:]] == ["add", "now"]


def test_an_empty_input_is_answered(scripts: Scripts) -> None:
    """Agents probe models so."""
    for given in ([], ""):
        assert answered(scripts, "x", input=given, instructions="Be brief.", max_output_tokens=1)["status"] == "incomplete"


def test_compaction_is_refused_with_a_way_around() -> None:
    for path, body in (
        (f"{URL}/compact", {"model": "fake-model", "input": "x"}),
        (URL, {"input": [{"type": "compaction_trigger"}]}),
    ):
        assert "provider's name" in error(Api(FakeLLM()).post(path, body))["message"]


def test_late_instructions_are_the_users_where_the_template_refuses_them(made: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    llm = ScriptedLLM(scripted.with_template(made, template), ["x"])
    given = [{"role": role, "content": text} for role, text in (("developer", "b"), ("user", "Hi"), ("developer", "c"))]
    assert Api(llm).post(URL, {"input": given, "instructions": "a"}).status_code == 200
    assert llm.seen[-1].prompt == "[system]a\nb[user]Hi\n<system-reminder>\nc\n</system-reminder>"


def test_a_broken_stream_ends_in_failed() -> None:
    llm = FakeLLM(script=lambda request, index: [72, ValueError("it broke")])  # type: ignore[list-item]
    *_, reported, failed = named_events(Api(llm).post(URL, {"input": "x", "stream": True}))
    assert (reported["type"], reported["message"], failed["type"]) == ("error", "it broke", "response.failed")
    assert failed["sequence_number"] == reported["sequence_number"] + 1
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize("stored", [False, True])
def test_a_loop_of_two_tools_with_the_openai_client(made: Tokenizer, stored: bool) -> None:
    tools: dict[str, Callable[..., Any]] = {"add": lambda a, b: a + b, "now": lambda: "noon"}
    llm = ScriptedLLM(made, [BOTH, 'It is 3. <tool_call>{"name": "now", "arguments": {}}</tool_call>', "3 at noon"])
    called: list[str] = []
    with running(llm) as server:
        client = server.openai()
        given: list[Any] = [{"role": "user", "content": "1 + 2, and when?"}]
        fields: dict[str, Any] = {"model": "fake-model", "tools": [TOOL, OTHER], "store": stored}
        for _ in range(4):
            with client.responses.stream(input=given, **fields) as stream:
                events = [event.to_dict() for event in stream]
                final = stream.get_final_response()
            assert events[-1]["response"]["id"] == final.id
            if stored:
                assert client.responses.retrieve(final.id).output_text == final.output_text
                assert [item.id for item in client.responses.input_items.list(final.id, order="asc")]
                fields["previous_response_id"], given = final.id, []
            else:
                given += [item.to_dict() for item in final.output]
            calls = [item for item in final.output if item.type == "function_call"]
            for call in calls:
                called.append(call.name)
                result = str(tools[call.name](**json.loads(call.arguments)))
                given.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                break
    assert called == ["add", "now", "now"]
    assert final.output_text == "3 at noon" and final.status == "completed"
    assert "<|im_start|>tool\n3" in (llm.seen[-1].prompt or "")


def test_the_clients_snapshot_is_the_final_object(made: Tokenizer) -> None:
    with running(ScriptedLLM(made, [BOTH])) as server:
        with server.openai().responses.stream(model="fake-model", input="Hi", tools=[TOOL, OTHER]) as stream:  # type: ignore[list-item]
            for _ in stream:
                pass
            state: Any = stream._state
            snapshot = state._ResponseStreamState__current_snapshot
        final = stream.get_final_response()
        for item, whole in zip(snapshot.output, final.output, strict=True):
            if item.type == "message":
                assert [part.text for part in item.content] == [part.text for part in whole.content]
            elif item.type != "reasoning":  # which the client does not accumulate
                assert (item.arguments, item.id, item.call_id) == (whole.arguments, whole.id, whole.call_id)
