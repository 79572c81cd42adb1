"""Ray: started or joined without its output, its errors as one sentence."""

import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import warnings
from typing import Any

from dlm_rag.errors import ConfigError, RunError, summarize_error
from dlm_rag.workers.placement import WorkerPlacement

CONNECT_TIMEOUT_SECONDS = 10.0
OBJECT_STORE_BYTES = 100 * 2**20  # weights never pass through it


def summarize_ray_error(error: Exception) -> str:
    """The first sentence, without Ray's ids."""
    first = summarize_error(error).partition(". ")[0]
    return re.sub(r"\b[0-9a-f]{16,}\b ?", "", first)[:200]


def start_ray(placement: WorkerPlacement) -> str:
    """Starts Ray for this process alone; returns the folder of its logs. Raises `RunError`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:  # read when Ray is imported
        # Ray's ports are open to the network: only this run knows the token.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    folder = tempfile.mkdtemp(prefix="dlm_rag-", dir="/tmp")  # a short path, for sockets
    _init_ray(
        RunError(f"Ray does not start; its logs are in {folder}"),
        address="local",
        num_cpus=placement.num_workers,
        num_gpus=placement.num_workers * placement.gpus_per_worker,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
    )
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None  # raylets report deaths there despite log_to_driver
    return folder


def join_ray(address: str) -> None:
    """Joins a running cluster. Raises `ConfigError` if there is none."""
    failure = ConfigError(f"no Ray cluster can be reached at {address}: start it, or correct the address")
    host, _, port = address.removeprefix("ray://").rstrip("/").rpartition(":")
    try:  # Ray itself waits half a minute
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError):
        raise failure from None
    with warnings.catch_warnings(action="ignore"):
        _init_ray(failure, address=address)


def _init_ray(failure: RunError | ConfigError, **options: Any) -> None:
    """Raises `failure`, with Ray's reason. SIGTERM and Ctrl-C keep their meaning, which Ray changes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        import ray

        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
    except Exception as error:
        raise type(failure)(f"{failure} ({summarize_error(error)})") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
