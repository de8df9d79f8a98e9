"""`penstock check`: a model beside Transformers' own class, layer by layer, and the engine's guarantees on it.

target    what is checked: a checkpoint, or a tiny random model that keeps every feature of a config
twin      Transformers' model and the outputs of its modules        ours    our model and the outputs of its layers
pairs     which of their modules computes which of our layers, from the parameter table alone
parity    the table of errors: against Transformers, and of the native kernels against the reference
cause     what the first difference points to
proofs    the engine's guarantees, with the real engine
run       all of it, and the certificate (penstock/models/certificate.py)
"""
