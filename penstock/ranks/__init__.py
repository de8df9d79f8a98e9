"""Several processes that compute one model. The engine sees them only as an Executor."""
