"""The ``headrace`` program, and ``python -m headrace.cli``."""

import sys

from headrace.errors import ConfigError


def program() -> None:
    from headrace.cli.main import app

    try:
        app(prog_name="headrace")
    except ConfigError as error:
        # Of the import of a command: the defaults of options come from the environment.
        sys.exit(f"headrace: {error}")


if __name__ == "__main__":
    program()
