"""Answer questions over HTTP, as OpenAI's chat completions, and step by step in a browser.

    dlm-rag serve                                    # the shipped model; then open http://127.0.0.1:8000/
    dlm-rag serve --model DIR_OR_HUB_ID --corpus passages.jsonl decode.batch_size=32
    dlm-rag serve --host 0.0.0.0 serving.keys=keys.txt

    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Who wrote Emma?"}]}'

SIGTERM or Ctrl-C ends it once what was taken is answered; a second one ends it at once. Needs
pip install 'dlm_rag[serve]'.
"""

import gc
import socket
from pathlib import Path

from dlm_rag.commands.prepare import SHIPPED, prepare, with_shipped
from dlm_rag.commands.words import CommandLine, parse
from dlm_rag.errors import ConfigError, fold_message
from dlm_rag.files.hub import SHIPS
from dlm_rag.program import note
from dlm_rag.progress import status

OPTIONS: dict[str, tuple[str | int, str]] = {
    "port": (8000, "where it listens"),
    "host": ("127.0.0.1", "the address it listens at; 0.0.0.0 lets other machines in"),
}
READ = ("model", "retrieval", "decode", "engine", "serving", "energy")


def main(argv: list[str]) -> None:
    words = parse(__doc__ or "", argv, typed=False, answers=True, options=OPTIONS)
    refuse_unread(words)
    config = with_shipped(words.config, [""])
    try:
        from dlm_rag.serving.access import Access, is_loopback
        from dlm_rag.serving.app import Service
        from dlm_rag.serving.keys import Keys
        from dlm_rag.serving.listen import listen
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: pip install 'dlm_rag[serve]'") from None
    keys = None if config.serving.keys is None else Keys.read(config.serving.keys)
    access = Access(is_loopback(words.options["host"]), keys)
    with taken(words.options["host"], words.options["port"]) as sock:
        prepared = prepare(config, [])
        words.tell()
        from dlm_rag.energy.meter import open_meter

        canvas, most = prepared.config.decode.canvas_length, config.serving.tokens
        assert canvas is not None
        if most is not None and most < canvas:
            raise ConfigError(
                f"serving.tokens={most} is less than the {canvas} of decode.canvas_length: set that too"
            )
        decoder = prepared.load()
        with open_meter(config.energy, prepared.device) as meter:
            name, bounded = model_name(config.model.path or ""), config.engine.memory_gib is not None
            service = Service(decoder, name, config.serving, meter, access, bounded)
            status()
            gc.collect()
            gc.freeze()  # what is loaded stays: to look through it again and again takes time
            listen(service, sock, lambda: note(f"{name} answers at {url_of(sock)}/; Ctrl-C ends it"))
        note(f"ended: {service.station.counts['answered']} answered")


def refuse_unread(words: CommandLine) -> None:
    """Raises `ConfigError` for settings that a server does not read."""
    for setting in words.settings:
        key = setting.partition("=")[0]
        if key.partition(".")[0] not in READ or key == "retrieval.oracle":
            raise ConfigError(f"serve does not read {key}: leave it out")
    if words.config.retrieval.oracle:
        raise ConfigError("retrieval.oracle needs supporting_ids, which typed questions do not have")


def model_name(path: str) -> str:
    """The name of a checkpoint for clients: a hub id, or the name of a folder without where it lies."""
    if path == str(SHIPPED / "model"):
        return "dlm-rag"
    known = path.startswith(SHIPS) or Path(path).expanduser().exists()
    return Path(path).expanduser().resolve().name if known else path


def url_of(sock: socket.socket) -> str:
    """Where a bound socket is reached, without a path."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def taken(host: str, port: int) -> socket.socket:
    """A socket bound to an address, at which nobody is let in yet; raises `ConfigError`."""
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address[0], port, *address[2:]))  # `getaddrinfo` takes ports modulo 2^16
    except (OSError, OverflowError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        reason = getattr(error, "strerror", None) or fold_message(error)
        raise ConfigError(f"{host}:{port} cannot be listened at ({reason}): name another --port") from None
    return sock
