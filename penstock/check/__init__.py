"""`penstock check`: a model beside Transformers' own class, layer by layer, and the engine's guarantees on it.

run: all of it; target: the checked model; ours, twin: both models and the outputs of their layers (trace); pairs: which
modules correspond; parity: the table of errors; cause: what the first difference points to; proofs: the guarantees.
"""
