"""Answer questions over HTTP, as OpenAI's chat completions and step by step in a browser.

    dlm-rag serve                                    # six example passages: open http://127.0.0.1:8000/
    dlm-rag serve --corpus passages.jsonl            # your own
    dlm-rag serve --model DIR_OR_HUB_ID --corpus passages.jsonl decode.batch_size=32
    dlm-rag serve --host 0.0.0.0 serving.api_keys_file=keys.txt

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}'

SIGTERM or Ctrl-C stops it once all are answered, a second at once. Needs `pip install 'dlm_rag[serve]'`.
"""

import gc
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dlm_rag.cli import print_note
from dlm_rag.commands.arguments import SEARCH_SETTINGS, CommandLine, parse_command_line
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER, fill_in_shipped_files, prepare_decoder
from dlm_rag.config import Config
from dlm_rag.energy import open_meter
from dlm_rag.errors import ConfigError, QuestionError, summarize_error
from dlm_rag.files.hub import SHIPPED_PREFIX
from dlm_rag.progress import show_status
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import CorpusRetriever, Retriever, count_passages
from dlm_rag.retrieval.corpus import Corpus, open_corpus
from dlm_rag.serving import conversation
from dlm_rag.text import FUNCTION_WORDS, get_title_line, strip_disambiguation

SERVE_OPTIONS: dict[str, tuple[str | int, str]] = {
    "port": (8000, "where it listens"),
    "host": ("127.0.0.1", "the address it listens at; 0.0.0.0 lets other machines in"),
}
CHAT_SETTINGS = (
    "model", "prompt", "retrieval", "-retrieval.oracle", "decode", "engine",
    "out", "-out",  # as sample: without a model the shipped reader
)  # fmt: skip
SERVED_BY = (
    "--model", "--corpus", "--config", "model.path=", "retrieval.corpus=", "retrieval.url=",
    "retrieval.method=",
)  # fmt: skip
MAX_TITLES_READ = 50
MAX_SUGGESTIONS, MAX_SUGGESTED_CHARS = 3, 60
EXAMPLES = SHIPPED_FOLDER / "examples"
WORLD = SHIPPED_FOLDER / "world"
WORLD_NOTE = (
    "This model knows an invented world alone: its people, places and companies do not exist, and of real "
    "ones it knows nothing."
)
HELP = "/sources: the passages of the last answer; /why: its steps; /quit: end"


def main(argv: list[str]) -> None:
    reads = (*CHAT_SETTINGS, "serving", "energy")
    words = parse_served(__doc__ or "", argv, reads, options=SERVE_OPTIONS)
    config = fill_in_shipped_files(words.config, [""])
    try:
        from dlm_rag.serving import app, http_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: pip install 'dlm_rag[serve]'") from None
    host = words.options["host"]
    access = http_server.AccessControl(host, config.serving.api_keys_file)
    with bind_socket(host, words.options["port"]) as sock:
        prepared = prepare_decoder(config, [])
        words.announce_reader()
        decoder, name = prepared.load(), get_served_model_name(config.model.path or "")
        known = describe_corpus(config, decoder.retriever)
        search, own = None, config.retrieval.url is None and config.retrieval.method != "none"
        if own and isinstance(decoder.retriever, CorpusRetriever):
            search = http_server.SearchService(decoder.retriever, prepared.config.retrieval)
        service = app.AnswerService(decoder, name, access, search, known)
        service.engine.meter = open_meter(config.energy, prepared.devices)
        show_status()
        gc.collect()
        gc.freeze()  # what is loaded stays: to look through it again and again takes time
        listening = f"{name} answers at {get_socket_url(sock)}/; Ctrl-C ends it"
        http_server.run_server(service, sock, lambda: print_note(listening))
        print_note(f"ended: {service.engine.counts['answered']} answered")


def parse_served(description: str, argv: list[str], reads: Sequence[str], **more: Any) -> CommandLine:
    """As `parse_command_line`; with nothing named, on the passages that ship. Raises `ConfigError`."""
    if not any(word.startswith(SERVED_BY) for word in argv):
        argv = [*argv, "--corpus", str(EXAMPLES / "passages.jsonl")]
    words = parse_command_line(description, argv, reads, **more)
    if words.config.retrieval.oracle:
        raise ConfigError("retrieval.oracle needs supporting_ids, which only questions of a file have")
    return words


def describe_corpus(config: Config, retriever: Retriever) -> tuple[tuple[str, ...], str]:
    """Questions to begin with (of what ships its own, else of titles), and what the model knows."""
    corpus = Path(config.retrieval.corpus or "").expanduser().resolve()
    if folder := next((each for each in (EXAMPLES, WORLD) if corpus.parent == each), None):
        asked = tuple(question.question for question in read_questions(folder / "questions.jsonl")[:3])
        return asked, WORLD_NOTE if folder == WORLD else ""
    if not isinstance(retriever, CorpusRetriever) or not isinstance(retriever.corpus, Corpus):
        return (), ""  # the passages are elsewhere
    rows = retriever.corpus[:: max(1, len(retriever.corpus) // MAX_TITLES_READ)]
    return suggest_questions([get_title_line(row.text) for row in rows if "\n" in row.text.strip()]), ""


def suggest_questions(titles: Sequence[str]) -> tuple[str, ...]:
    """Returns a few questions about what these titles name; none where they are no names."""
    found = dict[str, None]()
    for title in titles:
        shown = strip_disambiguation(title)
        named = not any(word[0].islower() and word not in FUNCTION_WORDS for word in shown.split())
        fits = 2 < len(shown) <= MAX_SUGGESTED_CHARS and shown[0].isupper()
        if fits and (named or shown.endswith("?")) and not re.search(r"[.:;,!\\/<>|{}\[\]#]", shown):
            found[shown if shown.endswith("?") else f"What is {shown}?"] = None
    return tuple(found)[:MAX_SUGGESTIONS]


def get_served_model_name(path: str) -> str:
    """The name of a checkpoint for clients: a hub id, or the name of a folder without where it lies."""
    if path.startswith(SHIPPED_PREFIX):
        return f"dlm-rag-{path.removeprefix(SHIPPED_PREFIX)}"
    folder = Path(path).expanduser()
    return folder.resolve().name if folder.exists() else path


def get_socket_url(sock: socket.socket) -> str:
    """Where a bound socket is reached, without a path."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address, at which nobody is let in yet; raises `ConfigError`."""
    sock = None
    try:  # not by `bind` alone, to which an empty name is every address
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address[0], port, *address[2:]))  # `getaddrinfo` takes ports modulo 2^16
    except (OSError, OverflowError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise ConfigError(f"cannot listen at {host}:{port} ({reason}): name another host or port") from None
    return sock


def retrieve_server(argv: list[str]) -> None:
    """Offer a corpus for search over HTTP, in the protocol of Search-R1's retrieval server.

        dlm-rag retrieve-server --corpus passages.jsonl
        dlm-rag retrieve-server --corpus passages.jsonl --port 8001 retrieval.method=hybrid

        curl http://127.0.0.1:8000/          # what is searched, and how
        curl http://127.0.0.1:8000/retrieve -d '{"queries": ["Who wrote Emma?"], "topk": 3}'
        dlm-rag sample "Who wrote Emma?" --model DIR retrieval.url=http://127.0.0.1:8000/retrieve

    Ctrl-C or SIGTERM stops it. Anyone who reaches the port may search; by default, only this machine does.
    Needs `pip install 'dlm_rag[serve]'`.
    """
    words = parse_command_line(retrieve_server.__doc__ or "", argv, SEARCH_SETTINGS, options=SERVE_OPTIONS)
    config = words.fill_retrieval()
    try:
        from dlm_rag.serving import http_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"retrieve-server needs {error.name}: pip install 'dlm_rag[serve]'") from None
    if config.corpus is None or config.url is not None or config.method == "none":
        raise ConfigError("a corpus is searched: give --corpus FILE, and neither a URL nor method=none")
    with bind_socket(words.options["host"], words.options["port"]) as sock:
        corpus = open_corpus(config.corpus, config.index_dir)
        retriever = load_retriever(config, corpus)
        access = http_server.AccessControl(words.options["host"])
        service = http_server.SearchService(retriever, config, access)
        show_status()
        url = f"{get_socket_url(sock)}{http_server.SEARCH_PATH}"
        searched = f"{len(corpus)} passages, by {config.method}, are searched at {url}"
        http_server.run_server(service, sock, lambda: print_note(f"{searched}; Ctrl-C ends it"))
    print_note("ended")


def chat(argv: list[str]) -> None:
    """Ask one question after another in a terminal; the model stays in memory.

        dlm-rag chat                                 # six example passages
        dlm-rag chat --corpus notes                  # your own
        dlm-rag chat --model DIR_OR_HUB_ID --corpus passages.jsonl

    Type a question and press Enter. "it" and "he" are what came before.

        /sources    the passages of the last answer
        /why        its steps: what each wrote, searched for and read
        /quit       end (or Ctrl-D)
    """
    words = parse_served(chat.__doc__ or "", argv, (*CHAT_SETTINGS, "-decode.batch_size"))
    config, console = fill_in_shipped_files(words.config, [""]), Console(highlight=False)
    prepared = prepare_decoder(config, [])
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.decode.terminal import LiveView, escape_text, render_reply, render_sources, render_steps

    decoder = prepared.load()
    show_status()
    passages = count_passages(decoder.retriever)
    console.print(conversation.reply_to_greeting("hello", passages), style="bold")
    suggested, note = describe_corpus(config, decoder.retriever)
    for line in (note, *(f"  {question}" for question in suggested), HELP):
        if line:
            console.print(escape_text(line, "dim"))
    turns, last = list[conversation.Turn](), Rollout("", "", "", 0)
    for typed in _read_lines(console):
        if typed.startswith("/"):
            if typed in ("/quit", "/exit", "/q"):
                return
            if shown := {"/sources": render_sources, "/why": render_steps}.get(typed):
                console.print(shown(last) if last.finished else Text("nothing was answered yet", "dim"))
            else:
                console.print(escape_text(HELP, "dim"))
            continue
        if said := conversation.reply_to_greeting(typed, passages):
            console.print(said)
            continue
        asked = conversation.make_question_stand_alone([*turns, ("user", typed)])
        try:
            with LiveView(console) if console.is_terminal else nullcontext() as view:
                (last,) = decoder.stream([Question("q1", asked)], view.step if view else None)
        except QuestionError as error:
            print_note(f"error: {error}")
            continue
        if asked != typed:
            console.print(escape_text(f"({asked})", "dim"))
        console.print(render_reply(last))
        turns += [("user", typed), ("assistant", last.answer)]


def _read_lines(console: Console) -> Iterator[str]:
    """Yields what is typed, without blank lines; with a prompt in a terminal."""
    if sys.stdin is None:
        raise ConfigError("standard input, which questions come from, is closed")
    if isinstance(sys.stdin, TextIOWrapper):  # bytes that are no text are an error of their question
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives `input` the arrow keys and what was typed before
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() and console.is_terminal else "").strip()
        except EOFError:
            return
        if line:
            yield line
