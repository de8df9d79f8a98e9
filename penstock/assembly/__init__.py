"""Composition root: from an EngineConfig to an engine with its executor. The only room that imports every part.

engine   directory -> ModelConfig -> resolved EngineConfig -> backend -> model -> cache plan -> runner -> engine
model    the backend and the weights            drafts   what guesses tokens ahead, if anything does
info     the description for clients, with the fingerprint
"""

import os

# Before torch is loaded, if it is: threads that wait by spinning keep the core from the one that they wait for as soon
# as another process wants one (measured on 2 cores with one busy neighbour: 5 tokens/s spinning, 100 sleeping).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


from penstock.assembly.engine import BuiltEngine, PlannedEngine, build_engine, plan_engine

__all__ = ["BuiltEngine", "PlannedEngine", "build_engine", "plan_engine"]
