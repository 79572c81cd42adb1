"""Programs on the ranks of `engine.tensor_parallel`, which torchrun has started, or else rank 0 starts."""

import ctypes
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_rag.cli import exit_rank, parse_int, print_note, run_program
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, RunError, summarize_error
from dlm_rag.machine import choose_device

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from dlm_rag.training.distributed import DistributedContext

START_MINUTES = 10  # for which ranks wait for one another to be ready
JOIN_SECONDS = 20  # in which ranks that are ready meet first
IDLE_MINUTES = 14 * 24 * 60  # for which ranks wait for rank 0, which may have no question for them
MEETING_SECONDS = 1.0  # between two meetings of the ranks
GRACE_SECONDS = 5.0  # in which a rank without the others ends by itself
PR_SET_PDEATHSIG = 1  # of Linux: a signal that a process gets when its parent ends


def check_tensor_parallel(config: Config) -> None:
    """Raises `ConfigError` where processes are fewer than ranks, or one of them could decide by itself."""
    size, count = config.engine.tensor_parallel, count_processes()
    if size > 1 and count != size and (count > 1 or config.workers is None):
        raise ConfigError(
            f"engine.tensor_parallel={size} needs {size} processes, not {count}: give it in the command of "
            "sample, evaluate or serve, which start them, or with workers="
        )


def count_processes() -> int:
    """How many ranks there are of this process, as torchrun or `start_other_ranks` has started them."""
    return parse_int(os.environ.get("WORLD_SIZE", "1"), 1, "WORLD_SIZE=")


def run_on_ranks(config: Config, answer: Callable[[], None]) -> None:
    """Runs `answer` on rank 0, and on the others what that asks for. Raises `ConfigError`, `RunError`."""
    size, count, device = config.engine.tensor_parallel, count_processes(), config.model.device
    if count not in (1, size):
        raise ConfigError(
            f"torchrun has started {count} processes: engine.tensor_parallel={count} splits the model over "
            f"them; for a model in each of them start without torchrun, with workers={count}"
        )
    if count > 1 and config.workers is not None:
        raise ConfigError("each of workers= starts ranks of its own: leave torchrun out")
    if size == 1 or config.workers is not None:
        return answer()
    if ":" in device:
        raise ConfigError(f"model.device={device} is one device: leave its number out")
    _, others = (None, []) if count > 1 else start_other_ranks(size, device)
    if os.environ.get("RANK") == "0":
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # of torchrun, when a rank has died
        _meet_and_run(lambda _: _lead(answer), 60 * START_MINUTES if count > 1 else JOIN_SECONDS)
    else:
        _follow(device, 60 * START_MINUTES)
    for process in others:
        with suppress(subprocess.TimeoutExpired):
            process.wait(2 * GRACE_SECONDS)
        process.kill()
    return None


@cache
def join_ranks_in_worker(size: int, device: str) -> "tuple[TCPStore, RankMeetings]":
    """Starts the ranks of which a worker's process is rank 0; it ends when one of them does, and
    another worker is started."""
    try:
        store, _ = start_other_ranks(size, device)
        return store, RankMeetings(JOIN_SECONDS)
    except RuntimeError as error:
        print_note(f"error: {error}")
        exit_rank(1)


def start_other_ranks(size: int, device: str) -> "tuple[TCPStore, list[subprocess.Popen[bytes]]]":
    """Makes this process rank 0, as torchrun would, and starts the others on this machine.

    They end with it; they reach one another through the store, which must be kept. Raises `ConfigError`
    for too few devices, `RunError` where one of them does not get ready.
    """
    import torch
    from torch.distributed import TCPStore

    if choose_device(device).type == "cuda" and (found := torch.cuda.device_count()) < size:
        raise ConfigError(f"engine.tensor_parallel={size} needs {size} CUDA devices, {found} are visible")
    door = socket.create_server(("127.0.0.1", 0))  # of this machine alone, as what is sent over gloo
    host, port = door.getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(size)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    modules = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "dlm_rag.commands.tensor_parallel", device],
            env=os.environ | modules | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )
        for rank in range(1, size)
    ]  # fmt: skip
    try:
        import dlm_rag.training.distributed  # noqa: F401 - which takes time, as for the others

        end = time.monotonic() + 60 * START_MINUTES
        while store.add("ready", 0) < len(others):
            if any(process.poll() is not None for process in others) or time.monotonic() > end:
                raise RunError("a rank of engine.tensor_parallel has ended, or waits, before it was ready")
            time.sleep(0.05)
    except BaseException:
        for process in others:
            process.kill()
        raise
    return store, others


def main(argv: list[str]) -> None:
    """A rank that rank 0 has started; argv: its device."""
    from torch.distributed import TCPStore

    import dlm_rag.decode.tensor_parallel  # what takes time comes before it is ready
    import dlm_rag.training.distributed  # noqa: F401

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # if stopped: rank 0 is gone
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        TCPStore(*address, is_master=False, timeout=timedelta(seconds=5)).add("ready", 1)
    except RuntimeError as error:
        raise RunError(_describe_lost_rank(error)) from error
    _follow(argv[0], JOIN_SECONDS)


def _follow(device: str, join_seconds: float) -> None:
    """Does what rank 0 asks for, until that is done. `join_seconds`: as of `RankMeetings`."""
    from dlm_rag.decode.tensor_parallel import follow_rank_0
    from dlm_rag.model.tensor_parallel import get_tensor_parallel

    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 takes them, and ends the others
        signal.signal(number, signal.SIG_IGN)
    _meet_and_run(
        lambda processes: follow_rank_0(get_tensor_parallel(), processes.local_device(device)), join_seconds
    )


def _meet_and_run(work: "Callable[[DistributedContext], None]", join_seconds: float) -> None:
    """Runs this rank's part once all have met. Raises `RunError` for a rank that is lost."""
    from dlm_rag.model.tensor_parallel import is_peer_lost

    meetings = None
    try:
        meetings = RankMeetings(join_seconds)
        work(meetings.processes)
    except RuntimeError as error:
        if not is_peer_lost(error):
            raise
        if meetings is None or meetings.leave() or meetings.processes.is_main:
            raise RunError(_describe_lost_rank(error)) from error
        return  # rank 0 has left, and says why
    finally:
        if meetings is not None:
            meetings.leave()
    meetings.processes.destroy()


def _describe_lost_rank(error: Exception) -> str:
    return (
        f"another rank has died or does not answer ({summarize_error(error)}); what was answered is kept, "
        "and the same command goes on from there"
    )


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


class RankMeetings:
    """All ranks meet once a second, in a thread of each: where one does not come, all of them end.

    A rank that waits for rank 0 may wait for long, and a sum on a GPU does not see that a process is gone.
    """

    def __init__(self, join_seconds: float) -> None:
        """Joins the process group; all ranks must call, each within so many seconds of the first."""
        import torch.distributed as dist

        from dlm_rag.model.tensor_parallel import MEETING_TIMEOUT, get_tensor_parallel
        from dlm_rag.training.distributed import DistributedContext

        self._leaving, self._lost = threading.Event(), False
        overdue = threading.Timer(join_seconds, self._end, [TimeoutError(f"for {join_seconds} s")])
        overdue.daemon = True
        overdue.start()
        self.processes = DistributedContext.init(START_MINUTES)
        get_tensor_parallel().idle_group = dist.new_group(timeout=timedelta(minutes=IDLE_MINUTES))
        self._group = dist.new_group(timeout=MEETING_TIMEOUT, backend="gloo")
        place = platform.node(), str(Path("/proc/self/ns/pid").readlink())
        ranks = self.processes.all_gather_object((*place, os.getpid()))
        here = [pid for *where, pid in ranks if tuple(where) == place and pid != os.getpid()]
        self._neighbours = [os.pidfd_open(pid) for pid in here]
        overdue.cancel()
        self._thread = threading.Thread(target=self._meet, daemon=True)
        self._thread.start()

    def leave(self) -> bool:
        """Ends the meetings of all ranks: this one is about to end. Whether one is lost."""
        self._leaving.set()
        self._thread.join()
        return self._lost

    def _meet(self) -> None:
        import torch
        import torch.distributed as dist

        error, leaving = Exception("it has left"), torch.zeros(1)
        try:
            while not leaving:
                leaving.fill_(self._leaving.wait(MEETING_SECONDS))
                dist.all_reduce(leaving, group=self._group)
        except RuntimeError as lost:
            error, self._lost = lost, True
            if not self.processes.is_main:  # rank 0 ends the rest, unless it is the one that is lost
                select.select(self._neighbours[:1], [], [], GRACE_SECONDS)
            for process in self._neighbours:  # what waits for one that is stopped goes on then
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
        if not self._leaving.wait(GRACE_SECONDS):
            self._end(error)

    def _end(self, error: Exception) -> None:
        print_note(f"error: {_describe_lost_rank(error)}")
        exit_rank(1)


if __name__ == "__main__":
    run_program(main)
