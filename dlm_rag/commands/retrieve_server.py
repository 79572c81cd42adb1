"""Let others search a corpus over HTTP, in the protocol of Search-R1's retrieval server.

    dlm-rag retrieve-server --corpus passages.jsonl
    dlm-rag retrieve-server --corpus passages.jsonl --port 8001 retrieval.kind=hybrid

    curl http://127.0.0.1:8000/          # what is searched, and how
    curl http://127.0.0.1:8000/retrieve -d '{"queries": ["Who wrote Emma?"], "topk": 3}'
    dlm-rag sample "Who wrote Emma?" --model DIR_OR_HUB_ID retrieval.url=http://127.0.0.1:8000/retrieve

Ctrl-C or SIGTERM ends it. Whoever reaches the port may search: by default that is this machine alone.
"""

import signal

from dlm_rag.commands.words import CommandLine, parse
from dlm_rag.errors import ConfigError, fold_message
from dlm_rag.program import note
from dlm_rag.progress import status

OPTIONS: dict[str, tuple[str | int, str]] = {
    "port": (8000, "where it listens"),
    "host": ("127.0.0.1", "the address it listens at; 0.0.0.0 lets other machines in"),
}
NOT_READ = ("retrieval.url", "retrieval.url_seconds", "retrieval.oracle", "retrieval.search_memory_gib")
LAST_SEARCH = 5.0  # seconds that the search under way has at the end


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, options=OPTIONS)
    refuse_unread(words)
    config = words.config.retrieval
    from dlm_rag.retrieval import load_retriever
    from dlm_rag.retrieval.corpus import open_corpus
    from dlm_rag.retrieval.server import Searches, SearchServer

    if config.corpus is None:
        raise ConfigError("no corpus: give --corpus FILE")
    host, port = words.options["host"], words.options["port"]
    try:
        server = SearchServer(host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or fold_message(error)
        raise ConfigError(f"{host}:{port} cannot be listened at ({reason}): name another --port") from None
    with server:
        corpus = open_corpus(config.corpus, config.index_folder)
        # Whoever asks is not known, so nothing is kept of what was asked before.
        server.searches = Searches(load_retriever(config, corpus, search_memory_gib=0.0), config)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        server.server_activate()
        status()
        note(f"{len(corpus)} passages, by {config.kind}, are searched at {server.url}; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.searches.lock.acquire(timeout=LAST_SEARCH)
            note("ended")


def refuse_unread(words: CommandLine) -> None:
    """Raises `ConfigError` for settings that a server does not read."""
    for setting in words.settings:
        key = setting.partition("=")[0]
        if not key.startswith("retrieval.") or key in NOT_READ:
            raise ConfigError(f"a server reads settings of retrieval, and not {key}: leave it out")
    config = words.config.retrieval
    if config.url is not None or config.oracle or config.kind == "none":
        raise ConfigError("a server searches a corpus: leave retrieval.url, oracle and kind=none out")
