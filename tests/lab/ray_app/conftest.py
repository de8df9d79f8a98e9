"""Ray, if it is installed, imported where its own warnings are no errors."""

import contextlib
import os
import warnings

# On a busy machine, Ray replaces a proxy that is not there after 5 s, again and again, until it gives up. It reads this
# when it is imported, and its processes inherit them.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "240"
os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"] = "240"

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
