"""A hub on this machine: data set repositories in memory, in the answers that huggingface_hub asks for."""

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """`files` by repository; `asked` has every request, `stall_after` bytes of a file the server waits.

    lfs: whether files say SHA-256, as large ones do; else git's digest. status: of refused repositories,
    with the hub's code. size: what it says of every file, if not the truth.
    """

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        self.files, self.asked, self.status = files, [], {}
        self.lfs, self.stall_after, self.corrupt, self.licence = True, None, False, "cc-by-sa-4.0"
        self.url, self.size, self.headers = "", None, {}

    def revision(self, repository: str) -> str:
        """The commit, which depends on all files."""
        return hashlib.sha1(repr(sorted(self.files[repository].items())).encode()).hexdigest()

    def describe(self, repository: str) -> dict:
        """As /api/datasets/OWNER/NAME?blobs=true."""
        siblings = []
        for name, data in self.files[repository].items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            found = {"rfilename": name, "size": self.size or len(data), "blobId": blob}
            siblings.append(found | ({"lfs": lfs} if self.lfs else {}))
        return {"id": repository, "sha": self.revision(repository), "siblings": siblings, "private": False,
                "gated": False, "tags": [], "downloads": 0, "likes": 0,
                "cardData": {"license": self.licence}}  # fmt: skip


@contextmanager
def serve_hub(hub: FakeHub):
    """Serves the hub on a free port; gives it, with its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def refuse(self, status, code):
            body = b'{"error": "refused"}'
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self):
            self.answer(head=True)

        def do_GET(self):
            self.answer(head=False)

        def answer(self, head):
            path = unquote(urlsplit(self.path).path).strip("/").split("/")
            hub.asked.append((self.command, "/".join(path), self.headers.get("Range")))
            api = path[:2] == ["api", "datasets"]
            repository = "/".join(path[2:4] if api else path[1:3])
            if repository in hub.status and (not api or hub.status[repository][0] == 401):
                return self.refuse(*hub.status[repository])
            if repository not in hub.files:
                return self.refuse(401, "RepoNotFound")
            if api:
                return self.send(json.dumps(hub.describe(repository)).encode(), head, {})
            data = hub.files[repository].get("/".join(path[5:]))
            if data is None:
                return self.refuse(404, "EntryNotFound")
            digest = hashlib.sha256(data).hexdigest()
            headers = {
                "X-Repo-Commit": hub.revision(repository),
                "ETag": f'"{digest}"',
                "X-Linked-Etag": digest,
                "X-Linked-Size": str(hub.size or len(data)),
                "Content-Type": "application/octet-stream",
            } | hub.headers
            return self.send(data[::-1] if hub.corrupt else data, head, headers)

        def send(self, data, head, headers):
            start = 0
            if asked := self.headers.get("Range"):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            self.send_response(206 if asked else 200)
            for key, value in (headers | {"Content-Length": str(len(data) - start)}).items():
                self.send_header(key, value)
            self.end_headers()
            if head:
                return
            stall = hub.stall_after if headers and not asked else None
            self.wfile.write(data[start : len(data) if stall is None else stall])
            self.wfile.flush()
            while stall is not None and hub.stall_after is not None:
                time.sleep(0.05)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.stall_after = None
        server.shutdown()
        thread.join()
        server.server_close()
