"""`penstock check`: compares a model layer by layer with Transformers' own class, and tests the engine's guarantees.

run: a whole check; target: the checked model; ours, twin: the two models, with the outputs of their layers (trace);
pairs: which modules correspond; parity: the table of errors; cause: the likely cause of the first difference; proofs:
the guarantees.
"""
