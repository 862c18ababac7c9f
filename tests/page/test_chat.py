"""The chat page in a browser."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.server.harness import wait_for

from page.conftest import audit

Open = Callable[..., Any]
TOOL = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}]


def say(page: Any, text: str) -> None:
    page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def reply(page: Any, nth: int = 0) -> Any:
    """The nth reply, when it is complete."""
    article = page.get_by_role("article", name="Model").nth(nth)
    article.get_by_text("first after").wait_for()
    return article


def bodies(page: Any) -> list[Any]:
    """Sampling parameters of the requests so far."""
    return [request.sampling for request in page.llm.seen]


def test_a_reply_is_rendered_and_kept(open_page: Open) -> None:
    page = open_page("# Title\n\nSome **bold** and `__init__`.\n\n- one\n- two\n\n```py\nx = 1\n```\n")
    say(page, "Hello *there*")
    article = reply(page)
    assert article.get_by_role("heading", name="Title").count() == 1
    assert article.locator("strong").inner_text() == "bold" and article.locator("code").first.inner_text() == "__init__"
    assert article.get_by_role("listitem").all_inner_texts() == ["one", "two"]
    assert article.locator("pre code").inner_text() == "x = 1"
    assert page.get_by_role("article", name="You").locator(".content").inner_text() == "Hello *there*"
    page.reload()
    assert reply(page).get_by_role("heading", name="Title").count() == 1


def test_edits_and_new_replies_are_branches(open_page: Open) -> None:
    page = open_page("answer one", "answer two", "answer three")
    say(page, "one")
    reply(page)
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2 of 2").wait_for()
    assert "answer two" in reply(page).inner_text()
    page.get_by_role("button", name="previous branch").click()
    assert "answer one" in reply(page).inner_text()
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message", exact=True).input_value() == "one"
    say(page, "other")
    page.get_by_text("answer three").wait_for()
    assert "2 of 2" in page.get_by_role("article", name="You").inner_text()


def test_sampling_follows_the_declaration(open_page: Open) -> None:
    page = open_page("ok")
    control = page.get_by_label("temperature", exact=True)
    assert (control.get_attribute("min"), control.get_attribute("max")) == ("0", "3.4028234663852886e+38")
    control.fill("0.25")
    control.blur()
    page.get_by_label("max_tokens", exact=True).fill("2")
    page.get_by_label("max_tokens", exact=True).blur()
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("System message").blur()
    say(page, "hi")
    assert "stopped at the limit of tokens" in reply(page).inner_text()
    [request] = page.llm.seen
    assert request.sampling.temperature == 0.25 and "Be brief." in page.llm.tokenizer.decode(request.prompt_token_ids)


def test_tokens_by_probability(open_page: Open) -> None:
    page = open_page("abc")
    page.get_by_label("token probabilities").check()
    say(page, "hi")
    reply(page).get_by_role("button", name="Show tokens").click()
    tokens = page.get_by_role("group", name="tokens by probability").locator("span")
    assert tokens.all_inner_texts()[:3] == ["a", "b", "c"]
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert '"b" 36.8 %' in page.locator(".alternatives").inner_text()


def test_reasoning_is_folded_and_tools_are_answered(open_page: Open) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    page = open_page(f"<think>let me see</think>{call}", "It is noon.")
    page.get_by_label("Tools, as a JSON list").fill(json.dumps(TOOL))
    page.get_by_label("Tools, as a JSON list").blur()
    say(page, "What time is it?")
    article = reply(page)
    assert article.get_by_text("let me see").is_visible() is False
    assert '"zone": "UTC"' in article.get_by_label("arguments").inner_text()
    article.get_by_label("result of get_time").fill("12:00")
    article.get_by_role("button", name="Send result").click()
    page.get_by_text("It is noon.").wait_for()
    assert "12:00" in page.llm.tokenizer.decode(page.llm.seen[1].prompt_token_ids)


def test_an_error_names_the_field(open_page: Open) -> None:
    page = open_page("ok", allow="400")
    page.get_by_label("JSON Schema of the answers").fill('{"type": "nothing"}')
    page.get_by_label("JSON Schema of the answers").blur()
    say(page, "hi")
    alert = page.locator(".log").get_by_role("alert")
    alert.wait_for()
    assert re.match(r"response_format[\w.]*: ", alert.inner_text())


HOSTILE = (
    """<img src=x onerror="document.title='taken'"><script>document.title='taken'</script>

[click](javascript:alert(1)) [site](https://example.com/a) ![shot](https://example.com/track.png)

<iframe src="https://example.com"></iframe> \u202eright to left

data: {"choices": []}

"""
    + "> " * 200
    + "deep\n\n"
    + "*" * 3000
)


def test_what_a_model_writes_stays_text(open_page: Open) -> None:
    page = open_page(HOSTILE)
    say(page, "hi")
    article = reply(page)
    assert page.title() == "headrace"
    assert article.locator(".content").locator("img, script, iframe").count() == 0
    assert "onerror" in article.inner_text() and "![shot]" in article.inner_text()
    links = article.locator("a")
    assert links.count() == 1 and links.get_attribute("href") == "https://example.com/a"
    assert "noopener" in links.get_attribute("rel")


def test_a_key_is_asked_for_and_is_in_no_address(open_page: Open) -> None:
    page = open_page("ok", api_keys=("secret",), allow="401")
    page.get_by_label("API key").last.fill("secret")
    page.get_by_role("button", name="Continue").click()
    say(page, "hi")
    reply(page)
    assert page.evaluate("JSON.stringify([location.href, {...sessionStorage}, {...localStorage}])").count("secret") == 0


DOT = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
BRING = """([base64, name]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], "a.png", { type: "image/png" }));
  const [selector, event] = name === "drop"
    ? [".composer", new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })]
    : [".composer textarea", new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })];
  document.querySelector(selector).dispatchEvent(event);
}"""


def test_pictures_are_chosen_dropped_and_pasted(open_page: Open) -> None:
    page = open_page("ok", allow="400")
    page.locator("main input[type=file]").set_input_files([{"name": "a.png", "mimeType": "image/png", "buffer": DOT}])
    shots = page.get_by_alt_text("attached picture")
    shots.wait_for()
    for way in ("drop", "paste"):
        page.evaluate(BRING, [base64.b64encode(DOT).decode(), way])
    shots.nth(2).wait_for()
    page.get_by_role("button", name="Remove").first.click()
    assert shots.count() == 2
    say(page, "What is it?")
    page.get_by_alt_text("picture of the message").first.wait_for()
    assert page.get_by_alt_text("picture of the message").count() == 2
    # The scripted model reads text alone, so the server names the part; a picture reached it.
    page.get_by_role("alert").filter(has_text="messages").wait_for()


def test_a_reply_is_stopped(open_page: Open) -> None:
    page = open_page("abc" * 1000)
    page.llm.step_seconds = 0.02
    say(page, "hi")
    page.get_by_text("abcabc").wait_for()
    page.get_by_label("Message", exact=True).press("Escape")
    page.get_by_text("stopped", exact=True).wait_for()
    assert page.get_by_role("button", name="Send").is_visible()
    assert page.get_by_role("article", name="Model").locator(".content").inner_text().startswith("abcabc")
    wait_for(lambda: bool(page.llm.aborted))


def test_answers_side_by_side(open_page: Open) -> None:
    page = open_page(("first", "other"), "second")
    page.get_by_label("answers side by side").fill("2")
    page.get_by_label("answers side by side").blur()
    say(page, "hi")
    page.get_by_role("button", name="Choose").wait_for()
    assert page.locator(".beside article .content").all_inner_texts() == ["first", "other"]
    assert page.llm.seen[0].sampling.n == 2
    page.get_by_role("button", name="Choose").click()
    assert [one.get_attribute("aria-pressed") for one in page.get_by_role("button", name=re.compile("Cho")).all()] == [
        "false",
        "true",
    ]
    say(page, "on")
    page.get_by_text("second").first.wait_for()
    page.get_by_role("article", name="Model").first.get_by_text("2 of 2").wait_for()


def test_an_answer_is_explained(open_page: Open) -> None:
    page = open_page("abcdefgh")
    page.get_by_label("max_tokens", exact=True).fill("2")
    page.get_by_label("max_tokens", exact=True).blur()
    say(page, "hi")
    reply(page).get_by_role("button", name="Explain").click()
    explained = page.get_by_role("region", name="explanation")
    explained.get_by_text("was cut off after 2 tokens, which is max_tokens").wait_for()
    reply(page).get_by_role("button", name="Explain").click()
    assert explained.count() == 0


def test_attention_of_an_answer(open_page: Open) -> None:
    page = open_page("abc")
    size: list[int] = []

    def weights(request: Any) -> list[float]:
        """Each token attends to the one before it, and the first to itself."""
        size.append(len(request.prompt_token_ids))
        return list(np.eye(size[-1], k=-1, dtype=np.float32).ravel())

    page.llm.pool = weights
    say(page, "hi")
    reply(page).get_by_role("button", name="Attention").click()
    view = page.get_by_role("region", name="attention")
    view.get_by_text("mean of 4 heads").wait_for()
    assert '"c" attends to "b" 100.0 %' in view.locator(".alternatives").inner_text()
    tokens = view.get_by_role("group", name="tokens by attention").locator("span")
    assert tokens.all_inner_texts()[-3:] == ["a", "b", "c"] and tokens.count() == size[0]
    tokens.last.focus()
    page.keyboard.press("ArrowLeft")
    assert '"b" attends to "a" 100.0 %' in view.locator(".alternatives").inner_text()
    assert view.locator("canvas").get_attribute("width") == str(size[0])
    view.get_by_label("head").fill("2")
    view.get_by_role("button", name="Show").click()
    view.get_by_text("head 2 of 4").wait_for()
    assert page.llm.seen[-1].pooling.query_head == 2


def test_conversations_leave_and_return_as_a_file(open_page: Open, tmp_path: Path) -> None:
    page = open_page("answer")
    say(page, "question")
    reply(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "kept.json")
    page.get_by_role("button", name="delete question").click()
    assert page.get_by_role("article").count() == 0
    page.locator("nav input[type=file]").set_input_files(tmp_path / "kept.json")
    assert "answer" in reply(page).inner_text()
    kept = json.loads((tmp_path / "kept.json").read_text())
    kept["conversations"][0]["nodes"][2]["parent"] = 7
    (tmp_path / "broken.json").write_text(json.dumps(kept))
    page.locator("nav input[type=file]").set_input_files(tmp_path / "broken.json")
    page.get_by_text("broken.json cannot be read").wait_for()
    page.reload()
    assert "answer" in reply(page).inner_text()


@pytest.mark.slow
def test_long_conversations_and_lines_are_shown(open_page: Open, tmp_path: Path) -> None:
    """200 turns, one of a megabyte in a line and one with halves of surrogate pairs."""
    page = open_page("ok")
    page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    texts = ["**turn** " * 20] * 198 + ["*[`" * 350_000, "\ud800 lone \udfff"]
    nodes: list[Any] = [{"parent": -1}]
    for text in texts:
        nodes.append({"parent": len(nodes) - 1, "role": "user", "content": "on"})
        nodes.append({"parent": len(nodes) - 1, "role": "assistant", "content": text})
    chosen = {str(at): at + 1 for at in range(len(nodes) - 1)}
    kept = {
        "format": "headrace-conversations-1",
        "conversations": [{"title": "long", "changed": 1, "nodes": nodes, "chosen": chosen}],
    }
    (tmp_path / "long.json").write_text(json.dumps(kept))
    page.locator("nav input[type=file]").set_input_files(tmp_path / "long.json")
    page.get_by_text("lone").wait_for()
    page.reload()
    page.get_by_text("lone").wait_for()
    assert page.get_by_role("article").count() == 400
    assert page.get_by_role("article", name="Model").nth(198).locator(".content").inner_text().startswith("*[`*[`")
    page.get_by_role("button", name="New conversation").click()  # The audit of so many elements takes minutes.


def test_a_schema_is_checked_as_it_is_written(open_page: Open) -> None:
    page = open_page('{"a": 1}', allow="400")
    field, alert = page.get_by_label("JSON Schema of the answers"), page.locator("aside [role=alert]")
    page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    field.fill('{"type": "object", "properties": {"a": {"type": "whole"}}}')
    field.blur()
    alert.filter(has_text="properties/a/type").wait_for()
    with page.expect_response("**/render"):
        field.fill('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
        field.blur()
    say(page, "hi")
    assert reply(page).locator(".content").inner_text() == '{"a": 1}'
    assert alert.inner_text() == "" and page.llm.seen[0].constraint is not None


def test_what_the_page_can_show_is_accessible(open_page: Open, axe: Any) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    page = open_page("# T\n\ntext `code`\n\n```\ncode\n```\n\n| a |\n| --- |\n| b |", f"<think>so</think>{call}")
    page.llm.pool = lambda request: list(np.eye(len(request.prompt_token_ids), dtype=np.float32).ravel())
    page.get_by_label("token probabilities").check()
    page.get_by_label("Tools, as a JSON list").fill(json.dumps(TOOL))
    page.get_by_label("Tools, as a JSON list").blur()
    say(page, "hi")
    for name in ("Attention", "Explain", "Show tokens"):
        reply(page).get_by_role("button", name=name).click()
    say(page, "on")
    reply(page, 1).get_by_text("reasoning", exact=True).click()
    reply(page, 0).get_by_role("button", name="Attention").click()
    page.get_by_text("mean of 4 heads").wait_for()
    assert audit(axe, page) == []


def test_metrics_have_tiles(open_page: Open) -> None:
    page = open_page("ok")
    page.locator(".tiles").get_by_text("running").wait_for()
    assert page.locator(".tiles svg").count() == 5


def test_narrow_screens_and_the_keyboard(open_page: Open) -> None:
    page = open_page("ok")
    page.set_viewport_size({"width": 360, "height": 640})
    page.reload()
    say(page, "hi")
    reply(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Conversations").click()
    assert page.get_by_role("button", name="New conversation").is_visible()


def test_the_api_has_a_page(open_page: Open) -> None:
    page = open_page("ok", path="/docs")
    page.get_by_text("POST /v1/chat/completions", exact=True).click()
    schema = httpx.get(page.url.replace("/docs", "/openapi.json")).json()
    field = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "properties"
    ]
    assert page.get_by_role("row", name="temperature").first.inner_text().endswith(field["temperature"]["description"])
