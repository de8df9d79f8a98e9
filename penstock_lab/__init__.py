"""The laboratory around the engine: proofs, measurements, simulations, plans, checks, and other projects' conventions.

It imports the engine; the engine never imports it. The engine finds what is added here through the entry points in
pyproject.toml: commands, a calling convention for models, launchers of ranks and engines on Ray, a profiler.
"""
