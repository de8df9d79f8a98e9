"""The plug-in "ray" of --distributed-executor-backend: an entry point of penstock.launchers. Ray is imported only when
a config asks for it."""

from penstock.config import EngineConfig
from penstock.errors import InvalidRequestError
from penstock.kernels.cpu.library import chosen_level
from penstock.ranks.launcher import Launcher

OPTION = "distributed_executor_backend"


def open_launcher(config: EngineConfig) -> Launcher:
    """Return the launcher of a resolved config's ranks on the cluster that RAY_ADDRESS names.

    Raises:
        InvalidRequestError: Ray is not installed, or there is no cluster.
        EngineError: the cluster has no room.
    """
    try:
        from penstock_lab.ray_app.cluster import join_cluster
        from penstock_lab.ray_app.rank_launcher import RayLauncher
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] not in ("ray", "grpc"):
            raise
        message = f"{OPTION}: Ray is not installed: pip install 'penstock[ray]'"
        raise InvalidRequestError(message, param=OPTION) from None
    join_cluster(OPTION)
    parallel = config.parallel
    size, stages = parallel.num_ranks, parallel.pipeline_parallel_size
    here = 1 if stages == 1 else 0  # without stages, this process is one of the ranks
    return RayLauncher(here, size * stages - here, config.numerics.threads or 1, chosen_level())
