"""A server under load against `sample` without one: answers a second, and how long a client waits.

    python profiling/bench_serve.py [--rounds 3] [--clients 64] [--each 10] [decode.batch_size=32]

The shipped model on the questions of its world. Both sides answer the same questions and take turns, round
after round: the server (a process of its own, on loopback, asked by so many clients at once, each with the
next question of all when its last one is answered) and a decoder in this process, which waits for nobody.
Both have one thread and keep their evidence from round to round; the clients run here, beside the server,
as threads with the standard library's client, the cheapest there is: they share the server's processors.
Answers must be the same. Expectation: 0.9 of the decoder's answers a second. Processor time is said too,
which depends less on what else the machine does.
"""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles

import torch
from bench_tools import TableRow, print_table, run_server

from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions, prepare_decoder
from dlm_rag.errors import RunError
from dlm_rag.machine import get_machine_name

OPTIONS: dict[str, tuple[str | int, str]] = {
    "rounds": (3, "of each side"),
    "clients": (64, "at once"),
    "each": (10, "questions of a client, on average"),
}


def run_client_load(address: str, clients: int, questions: list[str]) -> tuple[list[str], list[float]]:
    """What the clients were answered, and the seconds that each answer took."""
    seconds: list[float] = []
    left = iter(questions)  # one list: no client has questions left where others have none

    def client(_: int) -> list[str]:
        connection, texts = HTTPConnection(address, timeout=600), []
        for question in left:
            began = time.perf_counter()
            body = {"messages": [{"role": "user", "content": question}]}
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            answer = json.loads(connection.getresponse().read())
            seconds.append(time.perf_counter() - began)
            if "error" in answer:
                raise RunError(f"the server refused a question: {answer['error']['message']}")
            texts.append(answer["dlm_rag"]["response"])
        connection.close()
        return texts

    with ThreadPoolExecutor(clients) as threads:
        return [text for texts in threads.map(client, range(clients)) for text in texts], seconds


def read_server_metrics(address: str) -> dict[str, float]:
    """The server's counters, by their names."""
    connection = HTTPConnection(address)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r"^dlm_rag_(\S+?)(?:_total)? (\S+)$", text, re.MULTILINE)
    return {name: float(number) for name, number in found}


def read_resident_mb(process: int) -> int:
    """MB of memory that a process has now."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, typed=False, options=OPTIONS)
    rounds, clients, each = (words.options[name] for name in OPTIONS)
    settings = words.settings
    if not any(word.startswith("decode.batch_size=") for word in settings):
        settings = ["decode.batch_size=32", *settings]
    if not any(word.startswith("model.path=") for word in settings):
        settings = ["model.path=dlm_rag/shipped/model", *settings]
    config = fill_in_shipped_files(words.with_settings(settings).config, [])
    known = gather_questions(config, [])
    asked = [known[n % len(known)] for n in range(clients * each)]
    torch.set_num_threads(1)
    decoder = prepare_decoder(config, known).load()
    found: list[TableRow] = []
    waits: list[float] = []
    with run_server(["serve", *settings], r"answers at http://") as (address, process):
        for number in range(rounds + 1):  # the first one warms both up
            before = read_server_metrics(address)["processor_seconds"]
            began, here = time.perf_counter(), time.process_time()
            texts, seconds = run_client_load(address, clients, [q.question for q in asked])
            served = len(texts) / (time.perf_counter() - began)
            clients_seconds = time.process_time() - here
            counts = read_server_metrics(address)
            began, here = time.perf_counter(), time.process_time()
            alone = [rollout.response for rollout in decoder.stream(asked)]
            plain = len(asked) / (time.perf_counter() - began)
            spent = (counts["processor_seconds"] - before, time.process_time() - here, clients_seconds)
            if sorted(texts) != sorted(alone):
                raise RunError("the server gave other answers than the decoder")
            costs = [1000 * each / len(asked) for each in spent]
            row: TableRow = {"answers/s": served, "of the decoder's": served / plain}
            row |= dict(zip(("ms of the server", "of the decoder", "of the clients"), costs, strict=True))
            found.append(row | {"resident MB": read_resident_mb(process)})
            waits += seconds if number else []
    measured = [{key: [row[key] for row in found[1:]] for key in found[0]}]
    shared = f"{counts['row_steps'] / counts['steps']:.1f} of {config.decode.batch_size} rows a step"
    machine = get_machine_name(decoder.denoiser.device)
    print_table(
        measured, f"{machine}, {clients} clients x {each} questions, {shared}; processor time an answer"
    )
    pool, most = (counts[f"pool_{name}"] / 2**20 for name in ("bytes", "most_bytes"))
    marks = quantiles(waits, n=100)
    print(f"pool {pool:.0f} of {most:.0f} MiB; an answer took, s: ", end="")
    print(", ".join(f"p{n} {marks[n - 1]:.2f}" for n in (50, 95, 99)))


if __name__ == "__main__":
    run_program(main)
