"""The runner carries out the steps that the scheduler planned. Torch starts here.

executor (the engine's view) -> model_runner (one device, one step at a time) -> input_batch, sampler
"""
