"""English text for workloads."""

from pathlib import Path


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


SYSTEM_PROMPT = _read("system_prompt.txt").strip()
CHAT_PROMPTS = tuple(_read("chat_prompts.txt").splitlines())
PROSE = _read("prose.txt")
