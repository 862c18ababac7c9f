"""``python -m headrace.cli`` is the ``headrace`` program."""

from headrace.cli.main import app

app(prog_name="headrace")
