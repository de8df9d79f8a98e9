"""The runner carries out what the scheduler planned: torch starts here.

executor (the engine's view) -> worker (one device) -> model_runner (one step) -> input_batch, sampler.
"""
