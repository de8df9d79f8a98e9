"""Engines on a Ray cluster: `penstock serve --on-ray`, and `penstock_lab.ray_app:build` for a Ray Serve config file.

Ray Serve places replicas on machines, replaces those that die, and decides how many there are. A replica is a place for
an engine process. The client leases it, and from then on the engine is one of the client's engines like any other:

    our server (client/fleet.py decides who computes what, also after a death)
        | one lease per engine, through Serve               | one TCP connection per engine: frames (client/frames.py)
    a Serve replica (engines.py): an actor that starts  ->  an engine process (client/engine_process.py)

So tokens never pass through Ray, and everything that holds for several engines on one machine holds here.

    engines      the Serve deployment whose replicas hold engines; their number depends on the queued tokens
    routing      which replica a lease gets, in Serve's request-router interface
    remote       the client's end: leases, connections
    door         the listening end of connections between machines
    application  two ways to run the server
"""

from typing import Any


def build(args: dict[str, Any]) -> Any:
    """Call application.build(args). Ray is imported only here, so `door` needs none."""
    from penstock_lab.ray_app import application

    return application.build(args)
