"""A cluster on a desk, on one machine: what happens when the cable of a host is pulled out.

    sudo python profiling/netns_cluster.py --out runs/desk

Two hosts with one wire between them train together as two machines would: torchrun, its rendezvous over
the wire, gloo, a folder that both see. The cable is pulled out in the middle of a run, which goes on on the
first host alone and then on both; its steps and losses are held against those of a run on one host that
nobody disturbed. In whole copies, then in shards.

The hosts are network namespaces, which see nothing but each other; files and processors are the machine's.
The wire is a process that carries packets between two TUN devices (`tc netem` is not in all kernels),
10 Gb/s at most. Linux, root, /dev/net/tun and iproute2; nothing else is touched.
"""

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bench_tools import ROOT, parse_bench_args, write_json

from dlm_rag.cli import run_program
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.training.metrics_logger import read_metrics

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS_FILE = "127.0.0.1 localhost\n" + "".join(  # /etc/hosts; sockets of both kinds ask
    f"{address} desk-{n}\n::ffff:{address} desk-{n}\n" for n, address in enumerate(ADDRESSES, start=1)
)
MTU_BYTES = 65_000  # bytes; with 1,500 Python would carry a tenth
MAX_QUEUE_SECONDS = 0.05  # seconds that a packet waits for its turn; later ones are dropped, as by a switch
TINY_MODEL_SETTINGS = [
    "train.hidden_size=64", "train.num_hidden_layers=2", "train.vocab_size=400", "train.rows_per_set=2",
    "train.passage_sets_per_step=2", "train.world_passages=100", "train.worlds=1",
    "train.eval_steps=1000000", "train.eval_questions=1", "train.optimizer=adamw",
    "train.learning_rate=0.001", "decode.max_new_tokens=32", "retrieval.top_k=2",
]  # fmt: skip
TIMEOUT_SECONDS = 300  # seconds that anything here may take
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNSETIFF, _TUN_WITHOUT_HEADERS = 0x400454CA, 0x1001


class NetnsLink:
    """The two hosts, while it is open; then whatever still runs on them is killed and nothing is left.

    Raises `RunError` where this machine does not allow it.
    """

    def __init__(self, gbit: float, delay_ms: float) -> None:
        self.gbit, self.delay_ms = gbit, delay_ms
        self.hosts = [f"dlm-rag-{os.getpid()}-{n}" for n in range(2)]

    def __enter__(self) -> "NetnsLink":
        if reason := netns_unavailable_reason():
            raise RunError(f"two hosts cannot be made here: {reason}")
        with ExitStack() as stack:
            for host in self.hosts:
                stack.callback(_delete_host, host)
                run_ip("netns", "add", host)
                # Bound over /etc/hosts there: a name that nobody knows is waited for, for seconds.
                Path("/etc/netns", host).mkdir(parents=True)
                Path("/etc/netns", host, "hosts").write_text(HOSTS_FILE)
                run_ip("-n", host, "link", "set", "lo", "up")
            words = ["--wire", *self.hosts, str(self.gbit), str(self.delay_ms)]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._carrier = subprocess.Popen([sys.executable, __file__, *words], **pipes)
            stack.callback(stop_process, self._carrier)
            assert self._carrier.stdout is not None
            if self._carrier.stdout.readline() != "there\n":
                raise RunError("two hosts cannot be made here: the wire between them has ended")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, host: int, command: list[str], **options: Any) -> "subprocess.Popen[str]":
        """Runs a command on a host, in a process group of its own; options: of `subprocess.Popen`."""
        there = ["ip", "netns", "exec", self.hosts[host], *command]
        process = subprocess.Popen(there, text=True, start_new_session=True, **options)
        self._stack.callback(stop_process, process, group=True)
        return process

    def set_link_up(self, up: bool) -> None:
        """Puts the cable of the second host in, or pulls it out."""
        run_ip("-n", self.hosts[1], "link", "set", "wire", "up" if up else "down")

    def count_sent_bytes(self, host: int) -> int:
        """Bytes that a host has sent, with all headers and what was sent again."""
        statistics = "/sys/class/net/wire/statistics/tx_bytes"
        return int(run_ip("netns", "exec", self.hosts[host], "cat", statistics))


def stop_process(process: "subprocess.Popen[Any]", group: bool = False) -> None:
    """Kills what was started here, with all that it has started in its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL) if group else process.kill()
    process.wait()


def _delete_host(host: str) -> None:
    subprocess.run(["ip", "netns", "del", host], capture_output=True)
    shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)
    with suppress(OSError):  # others have hosts there
        Path("/etc/netns").rmdir()


def netns_unavailable_reason() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if os.geteuid():
        return "it takes root (sudo)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if shutil.which("ip") is None:
        return "there is no `ip`: apt-get install iproute2"
    host = f"dlm-rag-{os.getpid()}-tried"
    tried = subprocess.run(["ip", "netns", "add", host], capture_output=True, text=True)
    if not tried.returncode:
        tried = subprocess.run(["ip", "netns", "exec", host, "true"], capture_output=True, text=True)
        subprocess.run(["ip", "netns", "del", host], capture_output=True)
    return tried.stderr.strip() and f"network namespaces are not allowed ({tried.stderr.strip()})"


def run_ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _open_tun_device(host: str, address: str) -> int:
    """The open TUN device `wire` of a host."""
    with Path("/run/netns", host).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into {host}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _TUN_WITHOUT_HEADERS))
    subprocess.run(["ip", "addr", "add", f"{address}/24", "dev", "wire"], check=True)
    subprocess.run(["ip", "link", "set", "wire", "mtu", str(MTU_BYTES), "up"], check=True)
    return device


def forward_packets(hosts: list[str], gbit: float, delay_ms: float) -> None:
    """The wire itself, until it is killed or whoever made it has ended."""
    ends = [_open_tun_device(host, address) for host, address in zip(hosts, ADDRESSES, strict=True)]
    print("there", flush=True)
    seconds_a_byte, delay = 8e-9 / gbit, delay_ms / 1000
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # by where they come from
    free = [0.0, 0.0]  # when the last packet will have left
    while True:
        now = time.monotonic()
        for source, packets in enumerate(under_way):
            while packets and packets[0][0] <= now:
                with suppress(OSError):  # unplugged, or its queue is full: a packet is lost
                    os.write(ends[1 - source], packets.popleft()[1])
        due = min((packets[0][0] for packets in under_way if packets), default=now + 1)
        ready, _, _ = select.select([*ends, 0], [], [], max(0.0, due - now))
        now = time.monotonic()
        if 0 in ready:  # standard input is closed
            return
        for end in set(ready) & set(ends):
            source, packet = ends.index(end), os.read(end, MTU_BYTES + 100)
            leaves = max(now, free[source]) + seconds_a_byte * len(packet)
            if leaves - now < MAX_QUEUE_SECONDS + seconds_a_byte * MTU_BYTES:
                free[source] = leaves
                under_way[source].append((leaves + delay, packet))


def start_training(
    wire: NetnsLink | None, host: int, of: int, folder: Path, words: Sequence[str]
) -> "subprocess.Popen[str]":
    """Starts training on a host, one of so many, as it is started on a machine on a desk."""
    program = ["train.py", "--out", str(folder.resolve()), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"}
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE}
    if wire is None:
        return subprocess.Popen([sys.executable, *program], text=True, **options)
    if of > 1:
        launcher = [
            "-m", "torch.distributed.run", "--nnodes", str(of), "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-id", "desk",
            "--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", ADDRESSES[host],
        ]  # fmt: skip
        program = [*launcher, *program]
    return wire.start(host, [sys.executable, *program], **options)


def wait_for_step(steps: int, folder: Path, processes: "Sequence[subprocess.Popen[str]]") -> None:
    """Until the run has made so many steps; raises `RunError` where it ends before, or takes too long."""
    begun = time.monotonic()
    while len(read_metrics(folder / "metrics.jsonl")) < steps:
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() - begun > TIMEOUT_SECONDS:
            raise RunError(f"no step {steps}: {ended[0].communicate()[1][-2000:] if ended else 'too slow'}")
        time.sleep(0.005)


def wait_for_success(*processes: "subprocess.Popen[str]") -> None:
    """Waits for them; raises `RunError` where one failed."""
    for process in processes:
        _, error = process.communicate(timeout=TIMEOUT_SECONDS)
        if process.returncode:
            raise RunError(f"a host failed: {error[-2000:]}")


def measure_unplugged_run(
    folder: Path, steps: int = 36, way: str = "fsdp", words: Sequence[str] = ("train.timeout_minutes=0.2",)
) -> dict[str, Any]:
    """What became of a run whose cable was pulled out after a third of its steps.

    It goes on on the first host alone for another third, then on both.
    """
    words = [*TINY_MODEL_SETTINGS, f"train.max_steps={steps}", "train.save_steps=3", *words]
    whole, here, both = folder / "undisturbed", folder / "unplugged", [*words, f"train.parallel={way}"]
    wait_for_success(start_training(None, 0, 1, whole, words))
    with NetnsLink(1, 2) as wire:
        hosts = [start_training(wire, host, 2, here, both) for host in range(2)]
        wait_for_step(steps // 3, here, hosts)
        wire.set_link_up(False)
        begun = time.monotonic()
        _, said = hosts[0].communicate(timeout=TIMEOUT_SECONDS)
        seconds, reached = time.monotonic() - begun, [len(read_metrics(here / "metrics.jsonl"))]
        stop_process(hosts[1], group=True)  # its torchrun goes on asking the other's, which is out of reach
        wire.set_link_up(True)
        alone = start_training(wire, 0, 1, here, [*words, "--resume"])
        wait_for_step(2 * steps // 3, here, [alone])
        alone.terminate()  # SIGTERM: it saves, for both are there again
        wait_for_success(alone)
        reached.append(len(read_metrics(here / "metrics.jsonl")))
        wait_for_success(*[start_training(wire, host, 2, here, [*both, "--resume"]) for host in range(2)])
    ours, theirs = read_metrics(here / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl")
    pairs = zip(ours, theirs, strict=True)
    return {
        "seconds until the first host ended": seconds,
        "it said": next((line for line in said.splitlines() if line.startswith("error: ")), said[-2000:]),
        "steps made when it ended, when both were there again": reached,
        "numbers of all steps": [line["step"] for line in ours],
        "largest difference of a loss": max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs),
    }


def main(argv: list[str]) -> None:
    if argv[:1] == ["--wire"]:
        forward_packets(argv[1:3], float(argv[3]), float(argv[4]))
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that no host is left behind
    _, folder = parse_bench_args(__doc__ or "", argv, {})
    if reason := netns_unavailable_reason():
        raise ConfigError(f"two hosts cannot be made here: {reason}")
    found = {}
    for way in ("ddp", "fsdp"):
        shutil.rmtree(folder / way, ignore_errors=True)
        found[way] = measure_unplugged_run(folder / way, way=way)
        print(way, json.dumps(found[way], indent=2))
    write_json(folder / "desk.json", found)


if __name__ == "__main__":
    run_program(main)
