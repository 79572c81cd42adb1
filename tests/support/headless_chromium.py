"""A headless Chromium, driven over DevTools through two pipes; needs nothing but the browser.

with HeadlessChromium() as browser:
    browser.open(path, width=1200, height=800, dark=True)
    browser.run("document.title")
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from dlm_rag.errors import RunError

ANSWER_TIMEOUT_SECONDS = 60  # until an answer comes
CHROMIUM_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage",
)  # fmt: skip
KEY_CODES = {"ArrowDown": 40, "/": 191, "4": 52, "Enter": 13, "Tab": 9}


def find_chromium() -> str | None:
    """Where Chromium is, or None."""
    return shutil.which("chromium") or shutil.which("google-chrome")


class HeadlessChromium:
    """One page of a Chromium of its own; `complaints` are what its console has said of errors."""

    def __init__(self) -> None:
        program = find_chromium()
        if program is None:
            raise RunError("chromium is not here: apt-get install chromium")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()
        command = [program, *CHROMIUM_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        # The browser reads descriptor 3 and writes descriptor 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', *command],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._said, self._number, self._session = b"", 0, ""
        self._loaded = False
        self.complaints: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log"):
            self.call(f"{room}.enable")

    def __enter__(self) -> "HeadlessChromium":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._to)
        self._process.terminate()
        self._process.wait()
        os.close(self._from)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> Any:
        """What the browser answers to a command of its DevTools protocol; raises `RunError`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RunError(f"{method}: {answer['error']['message']}")
                return answer["result"]
        raise RunError("the browser has ended")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """What the browser says, as it comes; takes note of complaints."""
        ends = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while True:
            while b"\0" not in self._said:
                if not select.select([self._from], [], [], max(0.0, ends - time.monotonic()))[0]:
                    raise RunError(f"the browser has said nothing for {ANSWER_TIMEOUT_SECONDS} s")
                more = os.read(self._from, 1 << 20)
                if not more:
                    return
                self._said += more
            line, _, self._said = self._said.partition(b"\0")
            message = json.loads(line)
            self._note(message.get("method"), message.get("params", {}))
            yield message

    def _note(self, method: str | None, said: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(said["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(said["args"]))

    def open(
        self, path: Path, place: str = "", *, width: int = 1280, height: int = 800, dark: bool = False
    ) -> None:
        """Opens a file, at a place of it such as `#step=3`, and waits until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        wishes = {"color-scheme": "dark" if dark else "light", "reduced-motion": "reduce"}
        features = [{"name": f"prefers-{name}", "value": value} for name, value in wishes.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        # First another page: a change of the place alone loads nothing.
        for url in ("about:blank", path.resolve().as_uri() + place):
            self._load("Page.navigate", url=url)

    def _load(self, method: str, **parameters: Any) -> None:
        self._loaded = False
        self.call(method, **parameters)
        messages = self._messages()
        while not self._loaded:
            next(messages)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise; raises `RunError`."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RunError(str(done["exceptionDetails"].get("exception", {}).get("description")))
        return done["result"].get("value")

    def press_key(self, key: str) -> None:
        """Presses one of `KEY_CODES`."""
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        common = {"key": key, "windowsVirtualKeyCode": KEY_CODES[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
