"""A process that computes one stage of a pipeline, or a part of a stage. parallel/pipeline.py starts it."""

import pickle
import socket

from penstock.assembly.pipeline import Begin, make_stage_runner
from penstock.errors import ExecutorLostError, PenstockError
from penstock.parallel.channel import CannotStart, Channel, Ready, encode
from penstock.parallel.links import Links, inherit
from penstock.parallel.local import LocalRanks
from penstock.parallel.rank import Rank
from penstock.parallel.wire import WireLinks


def main(argv: list[str]) -> int:
    """Load a part and compute its steps until the engine closes the connection.

    argv: descriptors of inherited sockets: to the engine, from the stage before, to the next stage; -1 means none.
        They are followed by what the ranks of a stage communicate over, if it has several ranks (links.Meeting).
    """
    engine, before, after = (None if word == "-1" else Channel(socket.socket(fileno=int(word))) for word in argv[:3])
    if engine is None:
        raise ValueError("a rank needs the socket of its engine")
    return serve(engine, before, after, inherit(argv[3:]) if argv[3:] else None)


def serve(
    engine: Channel, before: Channel | None, after: Channel | None, ranks: Links | WireLinks | LocalRanks | None
) -> int:
    """Load a part and compute its steps over these connections. Return the exit status."""
    try:
        begin: Begin = pickle.loads(engine.receive())  # from the process that started this one
        runner = make_stage_runner(begin, ranks)
        engine.send(encode(Ready(runner.cache_bytes)))
    except (ExecutorLostError, OSError):
        return 0
    except (PenstockError, MemoryError) as error:
        message = str(error) or "there is not enough memory for its layers"
        engine.send(encode(CannotStart(message, getattr(error, "param", None))))
        return 1
    Rank(begin.stage, runner, engine, before, after, rank=begin.rank, peers=ranks).run()
    return 0
