"""What goes wrong while a run is under way, in one sentence that keeps the cause."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dlm_rag.errors import RunError, summarize_error

# What gloo, NCCL and torch's store say only of a lost process: NCCL's name is in all of its errors, and
# `socket` in those of any system call.
_GONE = re.compile(
    r"(connection|socket) (was |is )?(closed|reset|refused|aborted)|closed by (the )?peer|reset by peer"
    r"|broken pipe|timed? ?out|recv, got 0 bytes|ncclRemoteError|remote process exit",
    re.IGNORECASE,
)


@contextmanager
def translate_failures() -> Iterator[None]:
    """Turns what torch and the system say of a dead process, full memory or a full disk into `RunError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the memory of the device is full; the last checkpoint is intact: see --plan for what fits "
            "(gradient_accumulation_steps, activation_checkpointing, parallel=fsdp), then --resume"
        ) from error
    except RuntimeError as error:
        if isinstance(error, RunError) or not is_peer_lost(error):
            raise
        raise make_peer_lost_error(error) from error
    except (ConnectionError, TimeoutError):  # of a search, say: no file
        raise
    except OSError as error:
        raise RunError(
            f"{error.filename or 'a file of the run'} could not be written or read "
            f"({error.strerror or error}); the last checkpoint is intact: --resume goes on from it"
        ) from error


def make_peer_lost_error(error: BaseException) -> RunError:
    """What is said of `is_peer_lost`."""
    return RunError(
        f"another process of this run has died or lost its connection ({summarize_error(error)}); the last "
        "checkpoint is intact: start the run again with --resume"
    )


def is_peer_lost(error: BaseException) -> bool:
    """Whether an error of torch's is that another process is gone."""
    return _GONE.search(str(error)) is not None
