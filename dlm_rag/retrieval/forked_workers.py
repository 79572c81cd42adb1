"""A function of many items, in processes of this machine that end with the one that began them."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context, parent_process
from typing import Any, TypeVar

from dlm_rag.errors import CorpusError

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_WORKERS = 8  # more would take more memory

_function: Callable[[Any], Any]  # of a worker


def count_workers(items: int) -> int:
    """How many processes share so many items; 1: none but this one."""
    if sys.platform != "linux" or current_process().daemon:  # forks elsewhere are not safe; daemons may not
        return 1
    return min(items, len(os.sched_getaffinity(0)), MAX_WORKERS)


def map_in_processes(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Results as they come, in no order; a failure is raised here, after the items that are under way.

    Workers are forks: only items and results are pickled, and no program needs a guard against being
    imported. They must not use threads that libraries have begun here. Raises `CorpusError` where one was
    killed.
    """
    if (workers := count_workers(len(items))) < 2:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("fork"), _begin_worker, (function,))
    try:
        for done in as_completed([pool.submit(_call_function, item) for item in items]):
            yield done.result()
    except BrokenProcessPool:
        raise CorpusError(
            "a process that built the index was killed, as when memory is short: the same command goes on"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process stops the others
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _call_function(item: Any) -> Any:
    return _function(item)
