"""Find the Ray cluster named by RAY_ADDRESS or by this machine's Ray, or fail at once if there is none."""

import os
import socket

import grpc
import ray
from ray._private.services import get_ray_address_from_environment

from penstock.errors import invalid

ANSWER_S = 5.0  # time limit for the cluster's head node to answer


def join_cluster(option: str) -> None:
    """Connect this process to the cluster, unless it is already connected.

    option: the option that needs the cluster, for the error message.

    Raises:
        InvalidRequestError: there is no cluster, or it does not answer.
    """
    if ray.is_initialized():
        return
    try:
        address = get_ray_address_from_environment("auto", None)  # as in ray.init, which then retries for minutes
        problem = _problem(address)
        if problem is None:
            ray.init(address=address, logging_level="warning")
            return
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        problem = str(error).rstrip(".")
    hint = "start one with `ray start --head`, or set RAY_ADDRESS to that of one that runs"
    raise invalid(option, f"there is no Ray cluster: {problem}; {hint}")


def _problem(address: str) -> str | None:
    """Explain why a cluster cannot be reached; None if it answers or only Ray can find out."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return f"RAY_ADDRESS={address} is not an address like 10.0.0.1:6379"
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return None
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            return f"what listens at {address} does not answer as Ray does"
    return None
