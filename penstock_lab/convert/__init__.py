"""Writes checkpoints in another form: packed for memory maps, or the same tensors arranged otherwise."""
