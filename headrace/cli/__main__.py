"""The ``headrace`` program, and ``python -m headrace.cli``."""

import sys

from headrace.errors import ConfigError


def program() -> None:
    try:
        from headrace.cli.main import app
    except ConfigError as error:
        # The defaults of options come from the environment.
        sys.exit(f"headrace: {error}")
    app(prog_name="headrace")


if __name__ == "__main__":
    program()
