"""The laboratory's commands, which the entry point `penstock.commands` adds to the command line."""

COMMANDS = {
    "bench": "measure throughput and latency",
    "convert": "write a checkpoint in another form: packed, merged, separate",
    "check": "compare a model with Transformers, layer by layer",
    "prove": "prove on this machine what is promised: same bits, no stream dropped",
    "plan": "predict a model's memory and speed before it is loaded",
    "simulate": "run the real scheduler on a virtual clock: latencies and replicas for a load",
    "replay": "compute a record of an engine's last minutes again, and compare the bits",
    "explain": "show how far a model sees: receptive field, masks, tiles, pipeline",
    "table": "print a model's parameter table, or a template for a new one",
}
