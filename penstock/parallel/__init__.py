"""Several processes of one host that compute one model. The engine knows them as an Executor, and nothing more."""
