"""A small server of /v1/models and /v1/chat/completions, as a process: `python fake_openai_server.py
FOLDER`.

It writes its port into FOLDER/port and a line for every request into FOLDER/requests. What it answers
follows from words of the prompt: "busy" twice 503 and then an answer, "forbidden" 400, "endless" an answer
that is cut, "broken" a connection that ends, "slow" an answer after 30 seconds, "uncounted" tokens as texts
(with "1815") or in a list.
"""

import json
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
seen: Counter[str] = Counter()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path != "/v1/models":
            self.answer(404, {"error": {"message": "no such path"}})
        else:
            self.answer(200, {"object": "list", "data": [{"id": "tiny-writer"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        seen[prompt] += 1
        with (FOLDER / "requests").open("a") as file:
            line = {"prompt": prompt, "key": self.headers["Authorization"]} | body
            file.write(json.dumps(line) + "\n")
        if (FOLDER / "gone").exists():
            self.answer(503, {"error": {"message": "going down"}})
        elif "busy" in prompt and seen[prompt] < 3:
            self.answer(503, {"error": {"message": "overloaded"}})
        elif "forbidden" in prompt:
            self.answer(400, {"error": {"message": "this prompt is too long"}})
        elif "broken" in prompt and seen[prompt] < 2:
            self.close_connection = True
        else:
            time.sleep(30 if "slow" in prompt else 0.02)
            text = prompt.rpartition("\n")[2].removeprefix("Question: ")
            if "Markdown table" in prompt:
                number = "7" if "odd" in text else ""
                text = f"| Subject | Relation | Object |\n|---|---|---|\n| {text} | | {number} |"
            elif "Q:" in prompt:
                text = f"Q: What is said?\nA: {text}"
            elif text.startswith("other"):
                text = "Question: Who?"
            elif not text.startswith("same"):
                text = f'"Please say: {text}"'
            reason = "length" if "endless" in prompt else "stop"
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}
            if "uncounted" in prompt:
                usage = {name: f"{count}" for name, count in usage.items()} if "1815" in prompt else [5]
            self.answer(200, {
                "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}],
                "usage": usage,
            })  # fmt: skip

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
(FOLDER / "port.part").write_text(str(server.server_address[1]))
(FOLDER / "port.part").rename(FOLDER / "port")
server.serve_forever()
