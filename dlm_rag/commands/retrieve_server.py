"""Let others search a corpus over HTTP, in the protocol of Search-R1's retrieval server.

    dlm-rag retrieve-server --corpus passages.jsonl
    dlm-rag retrieve-server --corpus passages.jsonl --port 8001 retrieval.kind=hybrid

    curl http://127.0.0.1:8000/          # what is searched, and how
    curl http://127.0.0.1:8000/retrieve -d '{"queries": ["Who wrote Emma?"], "topk": 3}'
    dlm-rag sample "Who wrote Emma?" --model DIR_OR_HUB_ID retrieval.url=http://127.0.0.1:8000/retrieve

Ctrl-C or SIGTERM ends it. Whoever reaches the port may search: by default that is this machine alone.
`serving.connections` may be open. Needs pip install 'dlm_rag[serve]'.
"""

from dlm_rag.commands.serve import OPTIONS, taken, url_of
from dlm_rag.commands.words import CommandLine, parse
from dlm_rag.errors import ConfigError
from dlm_rag.program import note
from dlm_rag.progress import status

NOT_READ = ("retrieval.url", "retrieval.url_seconds", "retrieval.oracle", "retrieval.search_memory_gib")


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, options=OPTIONS)
    refuse_unread(words)
    config = words.config.retrieval
    try:
        from dlm_rag.serving.access import Access, is_loopback
        from dlm_rag.serving.listen import listen
        from dlm_rag.serving.search import PATH, SearchService
    except ModuleNotFoundError as error:
        raise ConfigError(f"retrieve-server needs {error.name}: pip install 'dlm_rag[serve]'") from None
    from dlm_rag.retrieval import load_retriever
    from dlm_rag.retrieval.corpus import open_corpus

    if config.corpus is None:
        raise ConfigError("no corpus: give --corpus FILE")
    with taken(words.options["host"], words.options["port"]) as sock:
        corpus = open_corpus(config.corpus, config.index_folder)
        # Whoever asks is not known, so nothing is kept of what was asked before.
        retriever = load_retriever(config, corpus, search_memory_gib=0.0)
        access = Access(is_loopback(words.options["host"]))
        service = SearchService(retriever, config, words.config.serving, access)
        status()
        searched = f"{len(corpus)} passages, by {config.kind}, are searched at {url_of(sock)}{PATH}"
        listen(service, sock, lambda: note(f"{searched}; Ctrl-C ends it"))
    note("ended")


def refuse_unread(words: CommandLine) -> None:
    """Raises `ConfigError` for settings that a server does not read."""
    for setting in words.settings:
        key = setting.partition("=")[0]
        if key != "serving.connections" and (not key.startswith("retrieval.") or key in NOT_READ):
            raise ConfigError(f"a server reads settings of retrieval, and not {key}: leave it out")
    config = words.config.retrieval
    if config.url is not None or config.oracle or config.kind == "none":
        raise ConfigError("a server searches a corpus: leave retrieval.url, oracle and kind=none out")
