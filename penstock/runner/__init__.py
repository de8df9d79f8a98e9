"""The runner carries out the steps that the scheduler has planned.

model_runner (one device, one step at a time) -> input_batch (what a step reads), sampler (what it chooses)
"""
