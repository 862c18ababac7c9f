"""The ``headrace`` program, and ``python -m headrace.cli``."""

import sys

from headrace.errors import ConfigError
from headrace.host.bytecode import keep_bytecode
from headrace.sources.user_cache import cache_directory


def program() -> None:
    keep_bytecode(cache_directory())
    from headrace.cli.main import app

    try:
        app(prog_name="headrace")
    except ConfigError as error:
        # Of the import of a command: the defaults of options come from the environment.
        sys.exit(f"headrace: {error}")


if __name__ == "__main__":
    program()
