"""Parses generated text into reasoning, content and tool calls, incrementally."""
