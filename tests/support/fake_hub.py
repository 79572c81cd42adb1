"""A hub on this machine: data set repositories in memory, in the answers that huggingface_hub asks for."""

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """`files` by repository; `asked` has every request.

    status: of refused repositories, with the hub's code. headers: instead of the right ones.
    """

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        self.files, self.asked, self.status = files, [], {}
        self.url, self.headers = "", {}

    def revision(self, repository: str) -> str:
        """The commit, which depends on all files."""
        return hashlib.sha1(repr(sorted(self.files[repository].items())).encode()).hexdigest()


@contextmanager
def serve_hub(hub: FakeHub):
    """Serves the hub on a free port; gives it, with its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            path = unquote(urlsplit(self.path).path).strip("/").split("/")
            hub.asked.append((self.command, "/".join(path)))
            repository = "/".join(path[1:3])
            if repository in hub.status:
                return self.send(*hub.status[repository])
            if repository not in hub.files:
                return self.send(401, "RepoNotFound")
            data = hub.files[repository].get("/".join(path[5:]))
            if data is None:
                return self.send(404, "EntryNotFound")
            digest = hashlib.sha256(data).hexdigest()
            headers = {
                "X-Repo-Commit": hub.revision(repository),
                "ETag": f'"{digest}"',
                "X-Linked-Etag": digest,
                "X-Linked-Size": str(len(data)),
                "Content-Type": "application/octet-stream",
            }
            return self.send(200, "", data, headers | hub.headers)

        do_GET = do_HEAD  # noqa: N815

        def send(self, status, code, data=b"", headers=()):
            self.send_response(status)
            headers = dict(headers) | {"Content-Length": str(len(data)), "X-Error-Code": code}
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
