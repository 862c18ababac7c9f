"""Sets how OpenMP's threads wait for work; takes effect only before its library is loaded.

By default they spin for milliseconds. Between the short products of a decoding step that is seldom worth it, and where any
other program wants the same cores, the threads that spin keep those off that have work: steps then take many times as long.
"""

from __future__ import annotations

import os
import sys

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPINS = 1000
"""A few microseconds: about as long as the next product of a step is away."""


def rest_early() -> None:
    """Lets waiting threads sleep soon, unless the user's environment says how they wait.

    Does nothing once torch, and so OpenMP's library, is loaded.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def policy() -> str:
    """The wait policy in the environment."""
    settings = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return " ".join(settings) or "OpenMP's default: torch was loaded before headrace's engine"
