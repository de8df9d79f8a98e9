"""Ray, if it is installed, imported where its own warnings are no errors."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
