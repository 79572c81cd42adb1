"""Encoding ahead: what decoding asks for is there, once, whoever wrote it and however it was stopped."""

import subprocess
import sys
from contextlib import nullcontext

import pytest

from dlm_rag.commands.index import encode
from dlm_rag.config import EngineConfig
from dlm_rag.engine.cache import KVCache, KVMemory
from dlm_rag.engine.engine import Decoder
from dlm_rag.engine.store import open_evidence_store
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.retrieval import load_retriever
from dlm_rag.tokenizer import Tokenizer
from tests.evidence.test_evidence_store import step
from tests.support.attention import ragged_kernel
from tests.support.commands import call, model  # noqa: F401 - fixtures
from tests.support.decoding import rollout_records
from tests.support.passages import PASSAGES, write_jsonl_file
from tests.support.paths import ROOT
from tests.support.processes import wait_until

INDEPENDENT = "model.evidence_layout=independent"


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def fill(call, store, model, corpus_file):
    """Runs the program in this process; returns its exit code and standard error."""

    def invoke(*words, corpus=corpus_file):
        given = ("--model", model, "--corpus", corpus, f"engine.store={store}", *words)
        code, out, err = call(*given, program=encode, defaults=False)
        assert not out
        return code, err

    return invoke


@pytest.fixture
def asked(monkeypatch, model, corpus_file):
    """The segments of passages that decoding asks for."""
    segments, read = [], KVCache._find_stored
    monkeypatch.setattr(
        KVCache, "_find_stored", lambda cache, missing: segments.extend(missing) or read(cache, missing)
    )
    tokenizer = Tokenizer.from_pretrained(model, "independent")
    retriever = load_retriever(corpus_file, top_k=3)
    decoder = Decoder(Denoiser.from_pretrained(model), retriever, tokenizer, None, "independent")
    decoder.decode(["Who wrote Emma?", "Who was born in Tacoma?"])
    return {segment for segment in segments if not segment.start}


def test_what_decoding_asks_for_is_encoded_once(fill, store, model, asked):
    code, err = fill(INDEPENDENT)
    assert code == 0 and f"{len(PASSAGES)} passages encoded, 0 there already" in err
    denoiser = Denoiser.from_pretrained(model)
    found = open_evidence_store(EngineConfig(store=str(store)), denoiser, KVMemory(denoiser).token)
    assert len(asked) >= 3 and all(found.get(segment) is not None for segment in asked)
    assert f"0 passages encoded, {len(PASSAGES)} there already" in fill(INDEPENDENT)[1]
    assert count_entries(store) == len(PASSAGES)
    fill(INDEPENDENT, "engine.cache_dtype=int8")
    assert count_entries(store) == 2 * len(PASSAGES), "of another dtype they are others"


def test_only_the_independent_layout_can_be_encoded_ahead(fill):
    code, err = fill("model.evidence_layout=prefix")
    assert code == 2 and "set model.evidence_layout=independent" in err


@pytest.fixture
def many(tmp_path):
    """A corpus that takes a second or two."""
    rows = [{"id": f"{n}", "contents": f"Passage {n} is about number {n}, and " * 2} for n in range(3000)]
    return write_jsonl_file(tmp_path / "many.jsonl", rows)


def start(model, corpus, store):
    command = [sys.executable, "-m", "dlm_rag", "encode", "--model", model, "--corpus", corpus, INDEPENDENT]
    return subprocess.Popen(
        [*map(str, command), f"engine.store={store}"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def count_entries(store):
    """Entries of a store; what a kill left half-written has another name."""
    return sum(not path.name.startswith(".") for path in store.glob("??/*.safetensors"))


@pytest.mark.slow
def test_a_fill_that_is_killed_is_gone_on_with_by_two_processes_at_once(fill, model, many, store):
    killed = start(model, many, store)
    wait_until(lambda: count_entries(store) > 100, killed)
    killed.kill()
    killed.communicate()
    there = count_entries(store)
    assert there < 3000
    both = [start(model, many, store) for _ in range(2)]
    assert all("3,000" not in process.communicate()[1] and not process.returncode for process in both)
    assert count_entries(store) == 3000
    code, err = fill(INDEPENDENT, corpus=many)
    assert code == 0 and "0 passages encoded, 3,000 there already" in err


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("memory", [nullcontext, ragged_kernel], ids=["by row", "gathered"])
def test_a_second_decoder_encodes_nothing_and_gives_the_same_tokens(
    store, model, corpus_file, memory, cache_dtype
):
    tokenizer = Tokenizer.from_pretrained(model, "independent")
    retriever = load_retriever(corpus_file, top_k=3)

    def decode(**settings):
        engine = EngineConfig(cache_dtype=cache_dtype, **settings)
        denoiser = Denoiser.from_pretrained(model)
        decoder = Decoder(denoiser, retriever, tokenizer, None, "independent", engine)
        found = rollout_records(decoder.decode(["Who wrote Emma?", "Who was born in Tacoma?"]))
        if decoder.model_runner.cache.store is not None:
            decoder.model_runner.cache.store.flush()
        return found, decoder

    with memory():
        plain, _ = decode()
        first, writer = decode(store=str(store))
        second, reader = decode(store=str(store))
    assert plain == first == second
    written, read = writer.model_runner.cache_stats, reader.model_runner.cache_stats
    assert written.encoded_segments == read.store_segments == count_entries(store) > 3
    assert not written.store_segments and not read.encoded_segments and not read.encoded_tokens
    assert f"{read.store_segments} from files" in reader.describe()
    step(reader.denoiser)
    with pytest.raises(ConfigError, match="have changed since"):
        reader.model_runner.reset_cache()
