"""Takes the pictures of the page that docs/page.md shows: ``PYTHONPATH=tests python -m page.gallery docs/img``."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright
from support.server.harness import running
from support.server.scripted import ScriptedLLM, tokenizer

MILLS = """A **water mill** turns falling water into work. Three kinds of wheels:

| wheel | water comes | efficiency |
| --- | --- | --- |
| undershot | below | 20 to 30 % |
| breastshot | at the axle | 50 to 65 % |
| overshot | above | 80 to 90 % |

```python
def power(flow, head, efficiency=0.85):
    \"\"\"Watts of a wheel; flow in m3/s, head in m.\"\"\"
    return 9810 * flow * head * efficiency
```
"""
CALL = "<think>The user wants the level, so I ask the gauge.</think>" + (
    '<tool_call>\n{"name": "river_level", "arguments": {"river": "Neckar", "unit": "cm"}}\n</tool_call>'
)
TOOL = {
    "type": "function",
    "function": {
        "name": "river_level",
        "description": "Level of a river at its gauge",
        "parameters": {"type": "object", "properties": {"river": {"type": "string"}, "unit": {"enum": ["cm", "m"]}}},
    },
}


def say(page: Any, text: str, replies: int = 1) -> None:
    page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.get_by_text("first after").nth(replies - 1).wait_for()


def fill(page: Any, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)
    page.get_by_label(label, exact=True).blur()


def chat(page: Any, llm: Any) -> None:
    llm.texts = [MILLS]
    fill(page, "System message", "You are a miller.")
    say(page, "How does a water mill work?")
    page.locator(".tiles").get_by_text("running").wait_for()


def tokens(page: Any, llm: Any) -> None:
    llm.texts = ["Water turns the wheel, and the wheel turns the stone."]
    page.get_by_label("token probabilities").check()
    say(page, "What does a mill do?")
    page.get_by_role("button", name="Show tokens").click()
    page.get_by_role("group", name="tokens by probability").locator("span").nth(12).focus()


def tools(page: Any, llm: Any) -> None:
    llm.texts = [CALL, "The Neckar stands at 142 cm, a little above its mean."]
    fill(page, "Tools, as a JSON list", json.dumps([TOOL], indent=1))
    say(page, "How high is the Neckar?")
    page.get_by_label("result of river_level").fill('{"level": 142}')
    page.get_by_role("button", name="Send result").click()
    page.get_by_text("142 cm").wait_for()
    page.get_by_text("calls river_level").click()


def side_by_side(page: Any, llm: Any) -> None:
    first = "Where the millrace bends,\nan old wheel counts the water \u2013\none turn for each cloud."
    second = "Rain fell in the hills;\nby evening the stone is warm\nand the flour is white."
    llm.texts = [(first, second)]
    fill(page, "answers side by side", "2")
    say(page, "Write a haiku about a mill.")


def attention(page: Any, llm: Any) -> None:
    llm.texts = ["The wheel turns the stone."]

    def weights(request: Any) -> list[float]:
        """As heads that look at the first token, the last ones and their own kind do."""
        ids = np.array(request.prompt_token_ids)
        size = len(ids)
        apart = np.subtract.outer(np.arange(size), np.arange(size))
        scores = 2.0 * np.equal.outer(ids, ids) - 0.3 * apart + 3.0 * (np.arange(size) == 0)
        scores = np.where(apart >= 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        return list((shares / shares.sum(1, keepdims=True)).astype(np.float32).ravel())

    llm.pool = weights
    page.set_viewport_size({"width": 1200, "height": 980})
    say(page, "What turns the stone?")
    page.get_by_role("button", name="Attention").click()
    page.get_by_text("mean of 4 heads").wait_for()


def explanation(page: Any, llm: Any) -> None:
    llm.texts = ["Rain falls in the hills, and the river carries it to the mill, where it turns the wheel."]
    fill(page, "max_tokens", "60")
    say(page, "How does the water come to the mill?")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("prefix cache").first.wait_for()


PICTURES: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "page-light": (chat, "light"),
    "page-dark": (chat, "dark"),
    "page-tokens": (tokens, "light"),
    "page-tools": (tools, "light"),
    "page-side-by-side": (side_by_side, "dark"),
    "page-attention": (attention, "light"),
    "page-explain": (explanation, "dark"),
}


def take(folder: Path) -> None:
    """Writes the pictures into a folder."""
    with tempfile.TemporaryDirectory() as model, sync_playwright() as playwright:
        llm = ScriptedLLM(tokenizer(Path(model)), [""])
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with running(llm) as server:
            for name, (play, scheme) in PICTURES.items():
                context = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 760})
                page = context.new_page()
                llm.seen = []
                page.goto(server.url)
                play(page, llm)
                page.screenshot(path=folder / f"{name}.png")
                context.close()
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]))
