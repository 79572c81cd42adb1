"""Two hosts on this machine and one wire between them, of a given speed and delay: network namespaces.

    with NetnsLink(gbit=1, delay_ms=2) as wire:
        wire.start(0, ["python", "server.py"]), wire.start(1, ["python", "client.py", wire.addresses[0]])
        wire.set_link_up(False)

The hosts see nothing but each other, over the interface `wire`; files and processors are the machine's. The
wire is a process that carries packets between two TUN devices: each leaves when those before it have
left at that speed, and arrives after the delay. Kernels have `tc netem` for this, but not all of them; this
one needs Linux, root, /dev/net/tun and iproute2. It carries 10 Gb/s at most, for which packets are large.
"""

import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlm_rag.errors import RunError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS_FILE = "127.0.0.1 localhost\n" + "".join(  # /etc/hosts; sockets of both kinds ask
    f"{address} desk-{n}\n::ffff:{address} desk-{n}\n" for n, address in enumerate(ADDRESSES, start=1)
)
MTU_BYTES = 65_000  # bytes; with 1,500 Python would carry a tenth
MAX_QUEUE_SECONDS = 0.05  # seconds that a packet waits for its turn; later ones are dropped, as by a switch
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_TUNSETIFF, _TUN_WITHOUT_HEADERS = 0x400454CA, 0x1001


class NetnsLink:
    """The two hosts, while it is open; then whatever still runs on them is killed and nothing is left.

    Raises `RunError` where this machine does not allow it.
    """

    addresses = ADDRESSES

    def __init__(self, gbit: float, delay_ms: float) -> None:
        self.gbit, self.delay_ms = gbit, delay_ms
        self.hosts = [f"dlm-rag-{os.getpid()}-{n}" for n in range(2)]
        self._carrier: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "NetnsLink":
        if reason := netns_unavailable_reason():
            raise RunError(f"two hosts cannot be made here: {reason}")
        try:
            for host in self.hosts:
                _ip("netns", "add", host)
                # Bound over /etc/hosts there: a name that nobody knows is waited for, for seconds.
                Path("/etc/netns", host).mkdir(parents=True)
                Path("/etc/netns", host, "hosts").write_text(HOSTS_FILE)
                _ip("-n", host, "link", "set", "lo", "up")
            command = [sys.executable, __file__, *self.hosts, str(self.gbit), str(self.delay_ms)]
            self._carrier = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._carrier.stdout is not None
            if self._carrier.stdout.readline() != "there\n":
                raise RunError("two hosts cannot be made here: the wire between them has ended")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            self.stop(process)
        if self._carrier is not None:
            self._carrier.terminate()
            self._carrier.wait()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
            shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)
        with suppress(OSError):  # others have hosts there
            Path("/etc/netns").rmdir()

    def start(self, host: int, command: list[str], **options: Any) -> "subprocess.Popen[str]":
        """Runs a command on a host, in a process group of its own; options: of `subprocess.Popen`."""
        there = ["ip", "netns", "exec", self.hosts[host], *command]
        process = subprocess.Popen(there, text=True, start_new_session=True, **options)
        self._started.append(process)
        return process

    def stop(self, process: "subprocess.Popen[Any]") -> None:
        """Kills what was started here, with all that it has started."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def set_link_up(self, in_: bool) -> None:
        """Puts the cable of the second host in, or pulls it out."""
        _ip("-n", self.hosts[1], "link", "set", "wire", "up" if in_ else "down")

    def set_speed(self, gbit: float) -> None:
        """Makes it another wire, while it is in use."""
        assert self._carrier is not None and self._carrier.stdin is not None
        print(gbit, file=self._carrier.stdin, flush=True)
        self.gbit = gbit

    def count_sent_bytes(self, host: int) -> int:
        """Bytes that a host has sent, with all headers and what was sent again."""
        listed = _ip("netns", "exec", self.hosts[host], "cat", "/sys/class/net/wire/statistics/tx_bytes")
        return int(listed)


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


def _ip(*words: str) -> str:
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
    """The wire itself, until it is killed; lines of standard input are new speeds."""
    ends = [_open_tun_device(host, address) for host, address in zip(hosts, ADDRESSES, strict=True)]
    print("there", flush=True)
    seconds_a_byte, delay = 8e-9 / gbit, delay_ms / 1000
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # by where they come from
    free = [0.0, 0.0]  # when the last packet will have left
    while True:
        now = time.monotonic()
        for source, packets in enumerate(under_way):
            while packets and packets[0][0] <= now:
                _write(ends[1 - source], packets.popleft()[1])
        due = min((packets[0][0] for packets in under_way if packets), default=now + 1)
        ready, _, _ = select.select([*ends, 0], [], [], max(0.0, due - now))
        now = time.monotonic()
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:  # who made it is gone
                return
            seconds_a_byte = 8e-9 / float(line)
        for end in set(ready) & set(ends):
            source, packet = ends.index(end), os.read(end, MTU_BYTES + 100)
            leaves = max(now, free[source]) + seconds_a_byte * len(packet)
            if leaves - now < MAX_QUEUE_SECONDS + seconds_a_byte * MTU_BYTES:
                free[source] = leaves
                under_way[source].append((leaves + delay, packet))


def _write(end: int, packet: bytes) -> None:
    with suppress(OSError):  # unplugged, or its queue is full: a packet is lost
        os.write(end, packet)


if __name__ == "__main__":
    *names, speed, wait = sys.argv[1:]
    forward_packets(names, float(speed), float(wait))
