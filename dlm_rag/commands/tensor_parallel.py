"""Programs on the ranks of `engine.tensor_parallel`, as torchrun starts them."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from dlm_rag.cli import parse_int
from dlm_rag.config import Config, EngineConfig
from dlm_rag.errors import ConfigError, RunError, summarize_error

IDLE_MINUTES = 14 * 24 * 60  # for which ranks wait for rank 0, which may have no question for them


def check_tensor_parallel(engine: EngineConfig) -> int:
    """How many processes torchrun has started, 1 without it; raises `ConfigError` where these are too few,
    or one of them could decide by itself."""
    size, count = engine.tensor_parallel, parse_int(os.environ.get("WORLD_SIZE", "1"), 1, "WORLD_SIZE=")
    if size > 1 and count != size:
        program = sys.argv[:1] if sys.argv[0].endswith(".py") else ["-m", "dlm_rag"]
        command = shlex.join(["torchrun", "--nproc-per-node", str(size), *program, *sys.argv[1:]])
        raise ConfigError(f"engine.tensor_parallel={size} needs {size} processes, not {count}: {command}")
    if size > 1 and engine.store is not None and engine.store_read == "auto":
        raise ConfigError(
            "engine.store_read=auto measures one device: set always or never with engine.tensor_parallel"
        )
    return count


def run_on_ranks(config: Config, answer: Callable[[], None]) -> None:
    """Runs `answer` on rank 0, and on the others what that asks for. Raises `ConfigError`, `RunError`."""
    count = check_tensor_parallel(config.engine)
    if config.engine.tensor_parallel != count:
        raise ConfigError(
            f"torchrun has started {count} processes: engine.tensor_parallel={count} splits the model over "
            f"them; for a model in each of them start without torchrun, with workers={count}"
        )
    if count == 1:
        return answer()
    if config.workers is not None:
        raise ConfigError("workers= have a whole model each: leave them out, or engine.tensor_parallel")
    if ":" in config.model.device:
        raise ConfigError(f"model.device={config.model.device} is one device: leave its number out")
    from dlm_rag.decode.tensor_parallel import follow_rank_0
    from dlm_rag.model.tensor_parallel import get_tensor_parallel
    from dlm_rag.training.distributed import DistributedContext, is_peer_lost

    processes = DistributedContext.init(IDLE_MINUTES)
    if processes.is_main:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # of torchrun, when a rank has died
    else:
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 takes them, and ends the others
            signal.signal(number, signal.SIG_IGN)
    try:
        if processes.is_main:
            _lead(answer)
        else:
            follow_rank_0(get_tensor_parallel(), processes.local_device(config.model.device))
    except RuntimeError as error:
        if isinstance(error, RunError) or not is_peer_lost(error):
            raise
        raise RunError(
            f"another rank has died or does not answer ({summarize_error(error)}); what was answered is "
            "kept, and the same command goes on from there"
        ) from error
    processes.destroy()
    return None


def _lead(answer: Callable[[], None]) -> None:
    """Runs `answer`, and tells the others when it is over, unless they are within a step."""
    from dlm_rag.model.tensor_parallel import get_tensor_parallel

    ranks = get_tensor_parallel()
    try:
        answer()
    finally:
        if not ranks.in_step:
            with suppress(RuntimeError):  # of one that has died
                ranks.broadcast([], in_step=True)
