"""Two hosts with a wire between them, in network namespaces: profiling/netns_cluster.py in little."""

import subprocess
import sys
import time

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "profiling"))

import netns_cluster
from netns_cluster import NetnsLink, netns_unavailable_reason

REASON = netns_unavailable_reason()
here = pytest.mark.skipif(bool(REASON), reason=f"no hosts: {REASON}")

SERVER = """
import socket
server = socket.create_server(("10.77.0.1", 5000))
print("there", flush=True)
connection, _ = server.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while word := connection.recv(1):
    connection.send(word)
"""
CLIENT = """
import socket, time
connection = socket.create_connection(("desk-1", 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
connection.settimeout(1)
while True:
    begun = time.monotonic()
    connection.send(b"x")
    try:
        connection.recv(1)
    except TimeoutError:
        break
    print(time.monotonic() - begun, flush=True)
"""


@here
def test_a_wire_delays_counts_and_can_be_pulled_out():
    with NetnsLink(1, delay_ms=5) as wire:
        server = wire.start(0, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        assert server.stdout.readline() == "there\n"
        client = wire.start(1, [sys.executable, "-c", CLIENT], stdout=subprocess.PIPE)
        there_and_back = [float(client.stdout.readline()) for _ in range(5)]
        assert min(there_and_back) >= 0.01
        assert wire.count_sent_bytes(1) > 5 * 41, "a byte each, and headers"
        wire.set_link_up(False)
        assert client.wait(timeout=120) == 0, "nothing comes back, and nobody is told"
        hosts = wire.hosts
    assert not {*hosts} & list_hosts()


def list_hosts():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


@here
@pytest.mark.slow
def test_sigterm_leaves_no_host(tmp_path):
    command = [sys.executable, str(ROOT / "profiling/netns_cluster.py"), "--out", str(tmp_path)]
    process = subprocess.Popen(command)
    hosts = {f"dlm-rag-{process.pid}-{n}" for n in range(2)}
    while not hosts <= list_hosts():
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 1 and not hosts & list_hosts()


@here
@pytest.mark.slow
def test_a_run_whose_cable_is_pulled_out_goes_on_alone_and_then_on_both(tmp_path):
    """Every step once, with the losses of a run that nobody disturbed."""
    found = netns_cluster.measure_unplugged_run(tmp_path, steps=15)
    assert "another process of this run has died or lost its connection" in found["it said"]
    assert found["numbers of all steps"] == list(range(15))
    ended, together = found["steps made when it ended, when both were there again"]
    assert 5 <= ended < together < 15
    assert found["largest difference of a loss"] < 1e-3
