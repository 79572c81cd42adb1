"""Ray: started or joined, kept quiet, and what it says put into sentences."""

import logging
import os
import re
import secrets
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dlm_rag.errors import ConfigError, RunError, summarize_error
from dlm_rag.workers.placement import WorkerPlacement

CONNECT_TIMEOUT_SECONDS = 10.0  # within which a cluster must take a connection
_IDS = re.compile(r"\b[0-9a-f]{16,}\b ?")
OBJECT_STORE_BYTES = 100 * 2**20  # bytes, of Ray's own here: weights never pass through it


class DeadWorkerError(Exception):
    """A worker is gone, or cannot be reached, which is taken for the same."""


def get_ray_result(ref: Any) -> Any:
    """What a call returned. Raises what it raised there, or `DeadWorkerError`."""
    import ray
    from ray.exceptions import RayError, RaySystemError, RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, RaySystemError):  # it could not even read what it was sent
            raise RunError(
                f"a worker does not understand what it is asked: {summarise_ray_error(error.cause)}"
            ) from None
        raise error.cause from error  # which has the lines where it happened
    except RayError as error:  # of the worker, its node, or what it had left there
        raise DeadWorkerError(summarise_ray_error(error)) from None


def summarise_ray_error(error: Exception) -> str:
    """Of Ray's many lines about a death what a person can use."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    for mark, said in (
        ("node has died", "its node is gone"),
        ("running low on memory", "the memory of its node was full"),
        ("worker process has died", "it was killed, or it crashed"),
        ("worker died unexpectedly", "it was killed, or it crashed"),
        ("raylet died", "its node is gone"),
        ("is unavailable", "it cannot be reached"),
        ("owner has exited", "the process that it belongs to is gone"),
        ("Failed to retrieve object", "what it had answered is lost"),
    ):
        if any(mark in line for line in lines):
            return said
    return _IDS.sub("", lines[-1])[:200].rstrip(".")


class RayErrorTranslator:
    """Raises what Ray says of a cluster that is gone as `RunError`."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from ray.exceptions import RayError

        if isinstance(error, RayError | ConnectionError):
            raise RunError(
                f"Ray at {self._address} is gone ({summarise_ray_error(error)}); the answers so far are "
                "kept, and "
                "the same command goes on from there"
            ) from None


@contextmanager
def preserve_interrupts() -> Iterator[None]:
    """A Ctrl-C that the code inside has caught and forgotten is raised again at the end."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    pressed = []

    def press(*signalled: Any) -> None:
        pressed.append(signalled)
        signal.default_int_handler(*signalled)

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def start_ray(places: WorkerPlacement, folder: str) -> None:
    """A Ray of this process's own, its logs in `folder`. Raises `RunError` where it does not start."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:  # both are read when it is imported
        # Its ports are open to the network: who does not know the token is not listened to.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray

        ray.init(
            address="local",
            num_cpus=places.num_workers,
            num_gpus=places.num_workers * places.gpus_per_worker,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
        )
    except Exception as error:
        raise RunError(f"Ray does not start ({summarize_error(error)}); its logs are in {folder}") from None
    from ray._private import worker

    # What raylets say of deaths goes to standard output otherwise, whatever `log_to_driver` says.
    worker.print_to_stdstream = lambda *_, **__: None


def join_ray(address: str) -> None:
    """A cluster that runs already. Raises `ConfigError` where there is none."""
    host, _, port = address.removeprefix("ray://").rstrip("/").rpartition(":")
    try:
        # Ray itself takes half a minute to see that nobody listens.
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
        import ray

        with warnings.catch_warnings(action="ignore"):
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:
        raise ConfigError(
            f"no Ray cluster can be reached at {address}: {summarise_ray_error(error)}"
        ) from None
