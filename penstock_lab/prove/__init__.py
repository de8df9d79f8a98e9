"""Proofs of the promises of docs/guarantees.md, on the user's own machine and model, for `penstock prove`.

A proof disturbs a real engine, client or server process in random ways, and compares what comes out with an undisturbed
run. It counts its trials and names whatever went wrong.
"""
