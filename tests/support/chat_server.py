"""The scripted server of chats, started and stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlm_rag.baselines import run as baselines_run
from tests.support.processes import wait_until


class ScriptedServer:
    """The process; `say` sets its script, `requests` is what it was asked since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.say()
        program = Path(__file__).with_name("scripted_chat_server.py")
        self.process = subprocess.Popen([sys.executable, str(program), str(folder)])
        wait_until((folder / "port").exists, self.process)
        self.base = f"http://127.0.0.1:{(folder / 'port').read_text()}/v1"
        self.url = f"{self.base.replace('http', 'openai')}/tiny"

    def say(self, *rules, models=("tiny",)) -> None:
        """rules: pairs of an expression and its replies, as the server has them."""
        (self.folder / "requests").unlink(missing_ok=True)
        scratch = self.folder / "script.part"
        scratch.write_text(json.dumps({"models": models, "rules": rules}))
        scratch.rename(self.folder / "script.json")

    @property
    def requests(self) -> list[dict]:
        path = self.folder / "requests"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines_run, "INITIAL_RETRY_SECONDS", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = ScriptedServer(tmp_path / "chat-server")
    yield found
    found.stop()
