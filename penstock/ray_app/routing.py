"""LeaseRouter: which replica a lease gets, in Serve's request-router interface; and who is told that a replica leaves.

Any free replica will do, as long as its machine computes with the bits of the others. Requests are not routed here but
by the dispatcher of the client that has the leases, which knows what each engine has cached and has to do.
"""

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from penstock.ray_app import remote


class LeaseRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray is an extra, without types here
    """Gives each lease a free replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that may be free, in any order; Serve asks them."""
        free = self.select_available_replicas(
            [replica for replica in candidate_replicas if replica.node_id not in remote.refused_nodes]
        )
        random.shuffle(free)
        return [free]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas there are: Serve is about to stop, or has lost, those that are missing."""
        super().update_replicas(replicas)
        for listener in list(remote.listeners):
            listener({replica.replica_id.unique_id for replica in replicas})
