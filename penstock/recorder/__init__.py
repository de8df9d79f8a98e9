"""The flight recorder: keeps what the engine decided in its last minutes, in memory that outlives the engine.

    executor  RecordedExecutor -> Recorder -> Ring      in the engine process: a record before and after each step
    ring      memory that the client shares with its engine, in segments; the oldest one is overwritten
    records   what is written, as typed msgpack         bundle   a file made from a ring, with or without the text
    history   turns records back into steps             audit    whether these steps may be computed, and were sound

Computing the steps again needs an engine, and is in prove/replay.py.
"""
