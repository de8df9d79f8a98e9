"""`penstock check`: a model beside Transformers' own class, layer by layer, and the engine's promises on it.

tiny      a config shrunk to seconds of work, with random weights that all matter
twin      Transformers' model, and what its modules say        ours    our model, and what its layers say
pairs     which of their modules is which of our layers, from the parameter table alone
parity    the table of errors, and what the first one points to
verify    the native kernels beside the reference, by the same hooks
proofs    the engine's promises, with the real engine
run       all of it, and the certificate (penstock/models/certificate.py)
"""
