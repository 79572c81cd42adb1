"""An OpenAI-style server whose replies are scripted, as a process: `python scripted_chat_server.py FOLDER`.

It writes its port into FOLDER/port and every request, with its path, as a line into FOLDER/requests.
FOLDER/script.json has what it says, read anew for each request:

    {"models": ["tiny"], "rules": [["regular expression", [REPLY, REPLY, ...]], ...]}

The first rule whose expression is found in the prompt (of a chat: its messages, one after another) gives
the reply; each time the next one, and at the end the last again. A REPLY is a text, or an object:
    text      what is said, with the last line of the prompt for {last line} (of "Question: a" with a);
              cut at the first of the request's `stop`, as servers do
    tokens    [[text, probability], ...] instead: with log-probabilities, the rest going to a second token
    finish    the finish_reason, which is else "stop"
    status    an HTTP error, with `text` as its message
    raw       the body as it is; "" ends the connection
    usage     instead of the true counts of words
    wait      seconds until it is said
Where the request asks for log-probabilities of a text, its words are tokens of probability 0.99.
"""

import json
import math
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


def describe_tokens(tokens, chat):
    """Log-probabilities in the form of chats, or in that of plain completions."""
    sure = [(text, math.log(p), math.log(max(1 - p, 1e-9))) for text, p in tokens]
    if chat:
        return {"content": [
            {"token": text, "logprob": p, "top_logprobs": [
                {"token": "other", "logprob": min(p, rest)}, {"token": text, "logprob": max(p, rest)},
            ]}
            for text, p, rest in sure
        ]}  # fmt: skip
    return {
        "tokens": [text for text, _, _ in sure],
        "token_logprobs": [p for _, p, _ in sure],
        "top_logprobs": [{text: p} for text, p, _ in sure],
    }


def make_answer(reply, body, prompt):
    """The JSON of a reply, and whether a stop text cut it."""
    last = prompt.rpartition("\n")[2].removeprefix("Question: ")
    said = reply.get("text", "").replace("{last line}", last)
    tokens = reply.get("tokens") or [[word, 0.99] for word in re.findall(r"\s*\S+", said)]
    text = "".join(text for text, _ in tokens) if "tokens" in reply else said
    cuts = [place for stop in body.get("stop") or [] if (place := text.find(stop)) >= 0]
    text = text[: min(cuts, default=len(text))]
    chat = "messages" in body
    choice = {"finish_reason": reply.get("finish", "stop")}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    if body.get("logprobs"):
        choice["logprobs"] = describe_tokens(tokens, chat)
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
