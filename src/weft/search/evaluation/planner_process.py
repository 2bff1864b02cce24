"""A planner: plans what it is asked for until the search closes its end of the socket.

python -m weft.search.evaluation.planner_process FILE_DESCRIPTOR
"""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic

from weft.planning.declared import declare
from weft.search.evaluation.evaluator import Evaluator
from weft.search.evaluation.planners import PlannedAhead, Setup, StepName


def serve(connection: Connection) -> None:
    """Answer questions, in turn, until the search closes its end, or ends, in the middle of one perhaps."""
    with suppress(EOFError, OSError):
        _serve(connection)


def _serve(connection: Connection) -> None:
    evaluators: dict[StepName, Evaluator] = {}
    while True:
        message = connection.recv()
        if isinstance(message, Setup):
            declare("the step that is searched", message.step.rules)
            evaluators[message.name] = Evaluator(*message[1:])
            continue
        begin = monotonic()
        found = evaluators[message.name].within(message.strategy, message.most)
        connection.send(PlannedAhead(found, monotonic() - begin))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
