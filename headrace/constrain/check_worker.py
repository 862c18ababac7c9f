"""The processes that check constraints: ``python -m headrace.constrain.check_worker SECONDS BYTES``."""

from __future__ import annotations

import os
import resource
import sys

import msgspec

from headrace.config import StructuredOutputsConfig
from headrace.constrain.checker import Checked, CheckJob, CheckSetup, ConstraintChecker, Refused
from headrace.constrain.limits import CHECK_STACK
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.errors import RequestError
from headrace.limited_process import ProcessLimits, read_setup, serve


def _checked(checker: ConstraintChecker, job: CheckJob) -> Checked:
    try:
        return Checked(checker.constraint(job.params, job.plan))
    except RequestError as error:
        return Checked(refused=Refused(error.message, error.param, error.code))
    except (MemoryError, RecursionError):
        return Checked()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (CHECK_STACK, hard))
    # The library tells there of each panic, which a client gets as its error.
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    setup = msgspec.msgpack.decode(read_setup(), type=CheckSetup)
    checker = ConstraintChecker(StructuredOutputsConfig(**setup.config), GrammarVocabulary.of_table(setup.vocabulary))
    checker.prepare()
    decoder = msgspec.msgpack.Decoder(CheckJob)

    def answer(data: bytearray, limits: ProcessLimits) -> bytes:
        return msgspec.msgpack.encode(_checked(checker, decoder.decode(data)))

    serve(answer)


if __name__ == "__main__":
    main()
