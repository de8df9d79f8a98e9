"""The flight recorder: what the engine decided in its last minutes, kept where it outlives the engine.

    executor  RecordedExecutor -> Recorder -> Ring      in the engine process: a record before and after each step
    ring      memory that the client shares with its engine, in segments of which the oldest is dropped
    records   what is written, as typed msgpack         bundle   a file made of a ring, with or without the text
    history   the records as steps again                audit    whether these steps may be computed, and were sound

Re-execution needs an engine and is in prove/replay.py.
"""
