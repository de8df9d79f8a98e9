"""Composition root: makes an engine with its executor from an EngineConfig. The only room that imports every part.

engine   directory -> ModelConfig -> resolved EngineConfig -> backend -> model -> cache plan -> runner -> engine
drafts   what guesses tokens ahead, if enabled    offload  blocks beyond the cache
info     the description for clients, with the fingerprint
memory   the bytes of an engine by purpose, and the size of its cache; sizes: those of a model's weights
streaming  what options change in the numbers of a model: the implementation, and the windows of StreamingLLM
fitting  the precision and the context at which a model fits this machine, for one conversation
convert  directory -> directory of packed weights, for one process or for several ranks
"""

import os

# Set before torch is loaded, if it is: as soon as another process needs a core, threads that spin while they wait keep
# the core from the thread that they wait for (measured on 2 cores with one busy neighbour: 5 tokens/s spinning, 100
# sleeping).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


from penstock.assembly.engine import BuiltEngine, PlannedEngine, build_engine, plan_engine, why_no_gpu
from penstock.assembly.fitting import Fitting, fit_here, fittings
from penstock.assembly.sizes import model_sizes

__all__ = [
    "BuiltEngine",
    "Fitting",
    "PlannedEngine",
    "build_engine",
    "fit_here",
    "fittings",
    "model_sizes",
    "plan_engine",
    "why_no_gpu",
]
