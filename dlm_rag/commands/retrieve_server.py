"""Offer a corpus for search over HTTP, in the protocol of Search-R1's retrieval server.

    dlm-rag retrieve-server --corpus passages.jsonl
    dlm-rag retrieve-server --corpus passages.jsonl --port 8001 retrieval.method=hybrid

    curl http://127.0.0.1:8000/          # what is searched, and how
    curl http://127.0.0.1:8000/retrieve -d '{"queries": ["Who wrote Emma?"], "topk": 3}'
    dlm-rag sample "Who wrote Emma?" --model DIR_OR_HUB_ID retrieval.url=http://127.0.0.1:8000/retrieve

Ctrl-C or SIGTERM stops it. Anyone who reaches the port may search; by default, only this machine does.
Needs `pip install 'dlm_rag[serve]'`.
"""

from dlm_rag.cli import print_note
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.serve import SERVE_OPTIONS, bind_socket, get_socket_url
from dlm_rag.errors import ConfigError
from dlm_rag.progress import show_status

READS = ("retrieval", "-retrieval.url", "-retrieval.timeout", "-retrieval.oracle")


def main(argv: list[str]) -> None:
    words = parse_command_line(__doc__ or "", argv, READS, options=SERVE_OPTIONS)
    config = words.config.retrieval
    try:
        from dlm_rag.serving.http_server import AccessControl, is_loopback, run_server
        from dlm_rag.serving.search_app import SEARCH_PATH, SearchService
    except ModuleNotFoundError as error:
        raise ConfigError(f"retrieve-server needs {error.name}: pip install 'dlm_rag[serve]'") from None
    from dlm_rag.retrieval import load_retriever
    from dlm_rag.retrieval.corpus import open_corpus

    if config.corpus is None or config.url is not None or config.method == "none":
        raise ConfigError("a corpus is searched: give --corpus FILE, and neither a URL nor method=none")
    with bind_socket(words.options["host"], words.options["port"]) as sock:
        corpus = open_corpus(config.corpus, config.index_dir)
        retriever = load_retriever(config, corpus)
        access = AccessControl(is_loopback(words.options["host"]))
        service = SearchService(retriever, config, access)
        show_status()
        url = f"{get_socket_url(sock)}{SEARCH_PATH}"
        searched = f"{len(corpus)} passages, by {config.method}, are searched at {url}"
        run_server(service, sock, lambda: print_note(f"{searched}; Ctrl-C ends it"))
    print_note("ended")
