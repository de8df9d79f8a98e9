"""Two ways to run the server on a Ray cluster.

penstock serve --on-ray     our server in this process, with all its options; the engines are Serve replicas
build(args)                 an application for a Serve config file: our server is a Serve deployment too
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.types import Receive, Scope, Send

from penstock import AsyncLLM, InvalidRequestError
from penstock.client.engine_client import EngineState
from penstock.client.engine_handle import MAX_REPLICAS
from penstock.errors import check_float, check_int, invalid, pop_options
from penstock.server.app import create_app
from penstock.server.options import ServerOptions
from penstock.server.serve import run
from penstock_lab.ray_app.cluster import join_cluster
from penstock_lab.ray_app.engines import ByQueuedTokens, EngineReplica
from penstock_lab.ray_app.remote import EnginePool

SERVER_OPTIONS = (
    "api_key", "served_model_names", "allowed_hosts", "allowed_origins", "tool_call_parser", "reasoning_parser",
    "request_timeout_s", "drain_timeout_s",
)  # fmt: skip
STOP_S = 3600.0  # time for the streams of a replica that Serve stops to end; afterwards they go on elsewhere
HEALTH_S = 2.0  # between Serve's health checks of a replica, so a dead one is replaced this soon
METRICS_S = 1.0  # between two reports of a replica to the autoscaler
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 5.0, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """The number of engines, and the resources that Ray reserves for each.

    Attributes:
        num_replicas: number of engines at the start, and the smallest number.
        max_replicas: the largest number of engines; the queued tokens decide between the two.
        num_cpus: cores of each engine.
        target_queued_tokens: tokens of prompts and expected outputs that one engine should have waiting.
        upscale_delay_s, downscale_delay_s: how long more, or fewer, engines must be needed before the number changes.
    """

    num_replicas: int = 1
    max_replicas: int | None = None
    num_cpus: float = 1.0
    target_queued_tokens: float = 16384.0
    upscale_delay_s: float = UPSCALE_DELAY_S
    downscale_delay_s: float = DOWNSCALE_DELAY_S

    def __post_init__(self) -> None:
        check_int("num_replicas", self.num_replicas, 1, MAX_REPLICAS)
        if self.max_replicas is not None:
            check_int("max_replicas", self.max_replicas, self.num_replicas, MAX_REPLICAS)
        check_float("num_cpus", self.num_cpus, 0.0, 4096.0, low_open=True)
        check_float("target_queued_tokens", self.target_queued_tokens, 0.0, 1e12, low_open=True)
        for name in ("upscale_delay_s", "downscale_delay_s"):
            check_float(name, getattr(self, name), 0.0, 1e6)

    @property
    def most(self) -> int:
        """The largest number of engines."""
        return self.max_replicas or self.num_replicas


def engines(options: ReplicaOptions) -> serve.Application:
    """Make the application in which every replica runs an engine."""
    scaling: dict[str, Any] = {"num_replicas": options.num_replicas}
    if options.most > options.num_replicas:
        policy = AutoscalingPolicy(
            policy_function=ByQueuedTokens, policy_kwargs={"target_queued_tokens": options.target_queued_tokens}
        )
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.num_replicas,
                max_replicas=options.most,
                upscale_delay_s=options.upscale_delay_s,
                downscale_delay_s=options.downscale_delay_s,
                metrics_interval_s=METRICS_S,
                look_back_period_s=max(2 * METRICS_S, min(UPSCALE_DELAY_S, options.upscale_delay_s)),
                policy=policy,
            )
        }
    deployment = serve.deployment(EngineReplica).options(
        name="PenstockEngine",
        max_ongoing_requests=1,  # the lease
        graceful_shutdown_timeout_s=STOP_S,
        health_check_period_s=HEALTH_S,
        ray_actor_options={"num_cpus": options.num_cpus},
        request_router_config=RequestRouterConfig(request_router_class="penstock_lab.ray_app.routing:LeaseRouter"),
        **scaling,
    )
    return deployment.bind(options.num_cpus)


def connect(handle: Any, options: ReplicaOptions, **client_options: Any) -> AsyncLLM:
    """Make a client of the engines behind a handle.

    Raises:
        InvalidRequestError: an option does not work with engines on Ray, or AsyncLLM refuses it.
    """
    if "flight_recorder" in client_options or "record_dir" in client_options:
        message = (
            "flight_recorder, record_dir: not allowed with engines on other machines, which cannot write to our memory"
        )
        raise InvalidRequestError(message, param="flight_recorder")
    if client_options.get("kv_role") is not None:
        raise invalid("kv_role", "not allowed on Ray: its directory of blocks is on one machine")
    if client_options.get("distributed_executor_backend") == "ray":
        option = "distributed_executor_backend"
        raise invalid(option, "not allowed with engines on Ray, whose ranks share their machine; use mp")
    if client_options.get("standby"):
        raise invalid("standby", "not allowed on Ray; start one more replica instead")
    pool = EnginePool(handle, options.most, options.num_replicas)
    llm = AsyncLLM(engine_plan=pool.engine_plan, flight_recorder=0, **client_options)
    pool.client = llm.client
    return llm


@contextmanager
def deployed(options: ReplicaOptions, name: str) -> Iterator[Any]:
    """Start engines on the cluster named by RAY_ADDRESS or by this machine's Ray, yield their handle, and end them.

    Raises:
        InvalidRequestError: there is no cluster.
    """
    join_cluster("on_ray")
    serve.start(proxy_location="Disabled")  # if Serve does not run yet; HTTP is served by this process
    try:
        yield serve.run(engines(options), name=name, route_prefix=None)
    finally:
        serve.delete(name)


def serve_here(options: ServerOptions, replicas: dict[str, Any], client: dict[str, Any]) -> int:
    """Run our server in this process until a signal ends it. Return its exit code.

    Args:
        replicas: options of ReplicaOptions.
        client: options of AsyncLLM; data_parallel_size is the number of replicas at the start.

    Raises:
        InvalidRequestError: an option is invalid, or there is no cluster.
    """
    counts = ReplicaOptions(num_replicas=client.pop("data_parallel_size", 1), **replicas)
    with deployed(counts, f"penstock-{options.port or os.getpid()}") as handle:
        return run(connect(handle, counts, **client).client, options)


# --- for a Serve config file ------------------------------------------------------------------------------------------


class _Forward:
    """The web application of the Serve replica in which it is called."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # the lifespan begins before the servable object exists, which has its own
            await serve.get_replica_context().servable_object.web(scope, receive, send)


class Server:
    """Our server as a Serve deployment with one replica, which holds the leases.

    Args:
        replicas: how many engines there are.
        server: options of the server.
        client: options of AsyncLLM.
        handle: the handle of the engines.
    """

    def __init__(self, replicas: ReplicaOptions, server: dict[str, Any], client: dict[str, Any], handle: Any) -> None:
        self._client = connect(handle, replicas, **client).client
        self._options = ServerOptions(host="0.0.0.0", **server)
        self._app = create_app(self._client, self._options)
        self._is_attached = False

    async def web(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._attach()
        await self._app(scope, receive, send)

    async def _attach(self) -> None:
        if not self._is_attached:
            self._is_attached = True
            await self._client.attach()
            self._app.state.context.kept.start()

    async def check_health(self) -> None:
        """Start the engines without waiting for a request. Raise RuntimeError if they cannot be restarted."""
        await self._attach()
        if self._client.status().state is EngineState.FAILED:
            raise RuntimeError("the engines cannot be restarted; the log says why")

    async def __del__(self) -> None:
        """End the engines. Serve first waits for open requests."""
        await self._client.shutdown()


def build(args: dict[str, Any]) -> serve.Application:
    """Make the application of a Serve config file: `import_path: penstock_lab.ray_app:build`.

    args: options of ReplicaOptions, SERVER_OPTIONS and AsyncLLM (model, dtype, max_queue_wait, ...).

    Raises:
        InvalidRequestError: an option is unknown or invalid.
    """
    rest = dict(args)
    replicas = pop_options(ReplicaOptions, rest)
    server = {name: rest.pop(name) for name in SERVER_OPTIONS if name in rest}
    for name in ("served_model_names", "allowed_hosts", "allowed_origins"):
        if name in server:
            server[name] = tuple(server[name])
    deployment = serve.deployment(serve.ingress(_Forward())(Server)).options(
        name="PenstockServer",
        num_replicas=1,
        max_ongoing_requests=100_000,  # our own limits refuse requests with 429 and say when to retry
        graceful_shutdown_timeout_s=float(server.get("drain_timeout_s", 30.0)),
        ray_actor_options={"num_cpus": 0},
    )
    return deployment.bind(replicas, server, rest, engines(replicas))
