"""An OpenAI-style server whose replies are scripted, as a process: `python scripted_chat_server.py FOLDER`.

It writes its port into FOLDER/port and every request, with its path, as a line into FOLDER/requests.
FOLDER/script.json has what it says, read anew for each request:

    {"models": ["tiny"], "rules": [["regular expression", [REPLY, REPLY, ...]], ...]}

The first rule whose expression is found in the prompt (of a chat: its messages, one after another) gives
the reply; each time the next one, and at the end the last again. A REPLY is a text, or an object:
    text      what is said, with the last line of the prompt for {last line} (of "Question: a" with a);
              cut at the first of the request's `stop`, as servers do
    finish    the finish_reason, which is else "stop"
    status    an HTTP error, with `text` as its message
    raw       the body as it is; "" ends the connection
    usage     instead of the true counts of words
    wait      seconds until it is said
"""

import json
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
matched: Counter[str] = Counter()
lock = threading.Lock()


def make_answer(reply, body, prompt):
    """The JSON of a reply, and whether a stop text cut it."""
    last = prompt.rpartition("\n")[2].removeprefix("Question: ")
    said = reply.get("text", "").replace("{last line}", last)
    cuts = [place for stop in body.get("stop") or [] if (place := said.find(stop)) >= 0]
    text = said[: min(cuts, default=len(said))]
    chat = "messages" in body
    choice = {"finish_reason": reply.get("finish", "stop")}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}
    return {"choices": [choice], "usage": reply.get("usage", usage)}


class Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize = "HTTP/1.1", -1  # headers and body in one packet

    def answer(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path != "/v1/models":
            return self.answer(404, b'{"error": {"message": "no such path"}}')
        names = json.loads((FOLDER / "script.json").read_text())["models"]
        data = [{"id": name} for name in names]
        return self.answer(200, json.dumps({"object": "list", "data": data}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or "\n".join(each["content"] for each in body["messages"])
        with lock:
            with (FOLDER / "requests").open("a") as file:
                line = {"path": self.path, "text": prompt, "key": self.headers["Authorization"]} | body
                file.write(json.dumps(line) + "\n")
            rules = json.loads((FOLDER / "script.json").read_text())["rules"]
            found = next((rule for rule in rules if re.search(rule[0], prompt)), None)
            replies = found[1] if found else [{"status": 400, "text": f"no rule for {prompt[-80:]!r}"}]
            reply = replies[min(matched[str(found)], len(replies) - 1)]
            matched[str(found)] += 1
        reply = {"text": reply} if isinstance(reply, str) else reply
        time.sleep(reply.get("wait", 0))
        if "status" in reply:
            self.answer(reply["status"], json.dumps({"error": {"message": reply["text"]}}).encode())
        elif reply.get("raw") == "":
            self.close_connection = True
        elif "raw" in reply:
            self.answer(200, reply["raw"].encode())
        else:
            self.answer(200, json.dumps(make_answer(reply, body, prompt)).encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
(FOLDER / "port.part").write_text(str(server.server_address[1]))
(FOLDER / "port.part").rename(FOLDER / "port")
server.serve_forever()
