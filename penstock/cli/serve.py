"""`penstock serve`: serves one model, or several, over the OpenAI API. Does not import torch."""

import argparse
import time
from typing import Any

from penstock.cli.models import add_pool_options, make_pool, named_models
from penstock.cli.options import (
    UNSET,
    add_engine_options,
    add_fields,
    add_log_level,
    add_model,
    engine_options,
    given_fields,
    given_names,
    parse_size,
)
from penstock.errors import InvalidRequestError
from penstock.interface import entry_points
from penstock.server.options import ServerOptions

CLIENT_OPTIONS = (  # options of AsyncLLM that are not engine options
    "standby",
    "data_parallel_size",
    "max_queued_requests",
    "max_queued_tokens",
    "max_queue_wait",
    "flight_recorder",
    "record_dir",
    "record_text",
    "kv_role",
    "kv_prefill_urls",
)
RAY_OPTIONS = {  # flag -> field of ReplicaOptions
    "max_replicas": "max_replicas",
    "target_queued_tokens": "target_queued_tokens",
    "cpus_per_replica": "num_cpus",
}
DESCRIPTION = "Serve a model, or several, over the OpenAI API. SIGTERM lets open requests finish."
EXAMPLES = """examples:
  penstock serve                                        the demo model on http://127.0.0.1:8000
  penstock serve /models/llama --port 9000 --api-key secret --served-model-name llama
  penstock serve --model small=/models/a,big=/models/b --memory 8GiB
  penstock serve --config penstock.yaml                 options from a file, named like the flags
  curl http://127.0.0.1:8000/v1/models
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_pool_options(parser)
    group = parser.add_argument_group("server")
    late = ("otlp_traces_endpoint", "request_timeout_s")
    add_fields(group, ServerOptions, [name for name in given_names(ServerOptions) if name not in late])
    help_text = "keep a second engine process loaded, which takes over at once when the first dies"
    group.add_argument("--standby", action="store_true", help=help_text)
    help_text = "engines that share the requests, each with the whole model and its part of the machine (default: 1)"
    group.add_argument("--data-parallel-size", type=int, default=UNSET, metavar="N", help=help_text)
    help_text = "memory for the record of the engine's last minutes; 0: keep none (default: 32MiB)"
    group.add_argument("--flight-recorder", type=parse_size, default=UNSET, metavar="SIZE", help=help_text)
    help_text = "directory where this record is written when an engine dies or a request fails (default: none)"
    group.add_argument("--record-dir", default=UNSET, metavar="DIR", help=help_text)
    help_text = "keep the token ids of prompts and answers in these records (default: on)"
    group.add_argument("--record-text", action=argparse.BooleanOptionalAction, default=UNSET, help=help_text)
    add_fields(group, ServerOptions, late[:1])
    add_log_level(group, "what is logged to standard error; info has a line for each request")
    _add_transfer_options(parser)
    _add_load_options(parser)
    _add_ray_options(parser)
    add_engine_options(parser)


def _add_transfer_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefill and decoding on different engines (both need --kv-offload-dir)")
    help_text = (
        "prefill: compute prompts for other servers; decode: let another server compute them (default: do both here)"
    )
    group.add_argument("--kv-role", metavar="ROLE", default=UNSET, help=help_text)
    help_text = "URL of a server with --kv-role prefill and the same --api-key (repeatable)"
    group.add_argument(
        "--kv-prefill-url", action="append", dest="kv_prefill_urls", default=UNSET, metavar="URL", help=help_text
    )


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Ray (needs penstock[ray] and a cluster; see the page on scaling)")
    help_text = "run the engines, --data-parallel-size of them, as Ray Serve replicas on the cluster at RAY_ADDRESS"
    group.add_argument("--on-ray", action="store_true", help=help_text)
    help_text = "maximum number of engines; more start when queued tokens need them (default: --data-parallel-size)"
    group.add_argument("--max-replicas", type=int, default=UNSET, metavar="N", help=help_text)
    help_text = "queued tokens per engine; with --max-replicas, more tokens start more engines (default: 16384)"
    group.add_argument("--target-queued-tokens", type=float, default=UNSET, metavar="N", help=help_text)
    help_text = "cores that Ray reserves for each engine (default: 1)"
    group.add_argument("--cpus-per-replica", type=float, default=UNSET, metavar="N", help=help_text)


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    help_text = "maximum number of choices that may wait; beyond it, requests get 429 (default: 8192)"
    group.add_argument("--max-queued-requests", type=int, default=UNSET, metavar="N", help=help_text)
    help_text = "maximum number of prompt tokens that may wait; beyond it, requests get 429 (default: 8M)"
    group.add_argument("--max-queued-tokens", type=parse_size, default=UNSET, metavar="N", help=help_text)
    help_text = (
        "seconds that a request may wait for its first token; if it would wait longer, it gets 429 (default: 60)"
    )
    group.add_argument("--max-queue-wait", type=float, default=60.0, metavar="S", help=help_text)
    add_fields(group, ServerOptions, ["request_timeout_s"])


def run(args: argparse.Namespace) -> int:
    started_at = time.monotonic()
    from penstock.client.async_llm import AsyncLLM

    options = ServerOptions(log_level=args.log_level, started_at=started_at, **given_fields(args, ServerOptions))
    client = {name: getattr(args, name) for name in CLIENT_OPTIONS if hasattr(args, name)}
    if "kv_prefill_urls" in client:
        client["kv_prefill_api_key"] = options.api_key
    ray_options = {name: getattr(args, flag) for flag, name in RAY_OPTIONS.items() if hasattr(args, flag)}
    if args.on_ray:
        return _serve_on_ray(options, ray_options, engine_options(args) | client)
    if ray_options:
        raise InvalidRequestError("max_replicas, target_queued_tokens, cpus_per_replica: only allowed with --on-ray")
    models = named_models(args)
    if models is not None:
        pool = make_pool(args, models, engine_options(args) | client)
        from penstock.server import serve

        return serve.run(pool, options)
    llm = AsyncLLM(**engine_options(args), **client)  # the engine loads while the server's modules are imported
    from penstock.server import serve

    return serve.run(llm.client, options)


def _serve_on_ray(options: ServerOptions, replicas: dict[str, Any], client: dict[str, Any]) -> int:
    """Serve in this process, with engines on the Ray cluster.

    Raises:
        InvalidRequestError: Ray is not installed, or there is no cluster.
    """
    return int(entry_points.load("servers", "ray", "on_ray")(options, replicas, client))
