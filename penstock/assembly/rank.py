"""A process that computes one stage of a pipeline; parallel/pipeline.py starts it."""

import signal
import socket
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock.assembly.model import make_grammars, make_model, make_ops, read_scales
from penstock.assembly.pipeline import Begin
from penstock.errors import ExecutorLostError, PenstockError
from penstock.layers.stage import Stage
from penstock.models.config_json import load_model_config
from penstock.parallel.channel import CannotStart, Channel, Ready, encode
from penstock.parallel.rank import Rank
from penstock.plugins.user_files import import_files
from penstock.runner.model_runner import ModelRunner
from penstock.runner.stage_runner import StageRunner
from penstock.weights.loader import weight_layers


def main(argv: list[str]) -> int:
    """Load a stage and compute its steps until the engine hangs up.

    argv: descriptors of inherited sockets: to the engine, from the stage before, to the next; -1 for none.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole process group, they are for the client, which drains
    engine, before, after = (None if word == "-1" else Channel(socket.socket(fileno=int(word))) for word in argv)
    if engine is None:
        raise ValueError("a rank needs the socket of its engine")
    try:
        begin = msgspec.msgpack.decode(engine.receive(), type=Begin)
        runner, ready = _load(begin)
        engine.send(encode(ready))
    except (ExecutorLostError, OSError):
        return 0
    except (PenstockError, MemoryError) as error:
        message = str(error) or "there is no memory for its layers"
        engine.send(encode(CannotStart(message, getattr(error, "param", None))))
        return 1
    Rank(begin.index, runner, engine, before, after).run()
    return 0


def _load(begin: Begin) -> tuple[StageRunner, Ready]:
    import_files(begin.config.imports)
    directory = Path(begin.directory)
    model_config = replace(load_model_config(directory), model_impl=begin.config.numerics.model_impl)
    ops = make_ops(begin.config, model_config)
    stage = Stage(range(begin.start, begin.stop), model_config.num_hidden_layers)
    model = make_model(begin.config, model_config, directory, ops, stage=stage)
    forms = make_grammars(model_config, directory) if stage.is_last else None
    scales = read_scales(begin.config, model_config)
    runner = ModelRunner(model, ops, begin.groups, begin.config, model_config, scales, forms, stage)
    weight_bytes = sum(layer.num_bytes for _, layer in weight_layers(model))
    return StageRunner(runner, stage), Ready(runner.cache_bytes, weight_bytes)
