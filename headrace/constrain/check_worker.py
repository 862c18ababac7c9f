"""The processes that check constraints: ``python -m headrace.constrain.check_worker``."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import NoReturn

import msgspec

from headrace.constrain.checker import Checked, CheckJob, CheckSetup, ConstraintChecker, Refused
from headrace.constrain.limits import CHECK_STACK
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.errors import RequestError
from headrace.host.jobs import answer_jobs, read_limits
from headrace.host.parent import Parent, run
from headrace.option_groups import StructuredOutputsConfig


def _checked(checker: ConstraintChecker, job: CheckJob) -> Checked:
    start = time.process_time()
    try:
        made = checker.constraint(job.params, job.plan)
        return Checked(msgspec.structs.replace(made, seconds=time.process_time() - start))
    except RequestError as error:
        return Checked(refused=Refused(error.message, error.param, error.code))
    except (MemoryError, RecursionError):
        return Checked()


def main(parent: Parent) -> NoReturn:
    limits = read_limits(parent)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (CHECK_STACK, hard))
    # The library tells there of each panic, which a client gets as its error.
    sys.stderr = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    setup = msgspec.msgpack.decode(parent.receive(), type=CheckSetup)
    checker = ConstraintChecker(StructuredOutputsConfig(**setup.config), GrammarVocabulary.of_table(setup.vocabulary))
    checker.prepare()
    decoder = msgspec.msgpack.Decoder(CheckJob)
    answer_jobs(parent, limits, lambda data: _checked(checker, decoder.decode(data)))


if __name__ == "__main__":
    run(main)
