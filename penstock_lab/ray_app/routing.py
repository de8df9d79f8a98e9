"""LeaseRouter: chooses the replica for a lease, through Serve's request-router interface, and reports leaving replicas.

Any free replica is suitable if its machine computes the same bits as the others. Requests are not routed here but by
the fleet of the client that holds the leases, which knows what each engine has cached and has to compute.
"""

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from penstock_lab.ray_app import remote


class LeaseRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray is an extra, without types here
    """Gives each lease a free replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Shuffle the replicas that may be free; Serve asks them in this order."""
        free = self.select_available_replicas(
            [replica for replica in candidate_replicas if replica.node_id not in remote.refused_nodes]
        )
        random.shuffle(free)
        return [free]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas exist. Serve has lost the missing ones, or is about to stop them."""
        super().update_replicas(replicas)
        for listener in list(remote.listeners):
            listener({replica.replica_id.unique_id for replica in replicas})
