"""Shapes conversations and answers for the protocols beside chat completions."""
