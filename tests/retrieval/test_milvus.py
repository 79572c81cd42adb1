"""Search in a Milvus, a real server over TCP: the same rankings as here, kills, and every sentence."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT

pytest.importorskip("milvus_lite")


from dlm_rag.__main__ import dispatch
from dlm_rag.commands.answer_job import LocalEngines, plan_answer_job
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER, fill_in_shipped_files
from dlm_rag.commands.serve import describe_corpus
from dlm_rag.config import Config, RetrievalConfig, load_config
from dlm_rag.errors import ConfigError, CorpusError, UserError
from dlm_rag.questions import read_questions
from dlm_rag.retrieval import dense, load_retriever
from dlm_rag.retrieval.base import CorpusRetriever, Query, SearchUnavailableError
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.milvus import CollectionInfo, MilvusCollection, ingest_corpus
from tests.support.milvus_server import MilvusServer, WordEncoder
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

WORLD = SHIPPED_FOLDER / "world"
SECONDS = 120.0  # a deadline that a loaded machine keeps too


@pytest.fixture(scope="module", autouse=True)
def words():
    """Vectors of words in place of an embedding model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "load_sentence_transformer", lambda *_: WordEncoder())
        yield


def asked(text: str) -> Query:
    return Query(text, (text,))


def entry(number: int, text: str) -> dict:
    return {"id": f"p{number}", "title": f"Title {number}", "contents": text}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = MilvusServer(tmp_path_factory.mktemp("milvus") / "data")
    yield found
    found.kill()


@pytest.fixture
def own_server(tmp_path):
    """One that a test may kill."""
    found = MilvusServer(tmp_path / "data")
    yield found
    found.resume()
    found.kill()


def build(server: MilvusServer, name: str, path: Path, **settings) -> CorpusRetriever:
    """A collection of the passages of a file, and search in it."""
    settings = {"method": "dense"} | settings
    ingest_corpus(
        MilvusCollection(server.url(name), SECONDS), open_corpus(path), RetrievalConfig(**settings)
    )
    return load_retriever(url=server.url(name), timeout=SECONDS, **settings)


def spread(server: MilvusServer, name: str, path: Path, like: CollectionInfo) -> None:
    """A collection that the server holds in many files, its passages written in another order."""
    corpus, collection = open_corpus(path), MilvusCollection(server.url(name), SECONDS)
    collection.create(replace(like, finished=0))
    collection.describe()
    collection.check_index(create=True)
    rows = list(range(len(corpus)))
    random.Random(1).shuffle(rows)
    client = server.client()
    for start in range(0, len(rows), 100):
        for row in rows[start : start + 100]:
            vectors = WordEncoder().encode([corpus[row].text]).tolist()
            collection.upsert_passages(row, [corpus[row]], vectors)
        client.flush(name)
    collection.finish_build()


@pytest.fixture(scope="module")
def few(server, tmp_path_factory):
    """Every 8th passage of the shipped world, some twice: file and collection."""
    lines = (WORLD / "corpus.jsonl").read_text().splitlines()[::8]
    entries = [json.loads(line) for line in lines]
    twice = [entry | {"id": f"again-{entry['id']}"} for entry in entries[:60]]
    path = write_jsonl_file(tmp_path_factory.mktemp("few") / "corpus.jsonl", [*entries, *twice])
    return path, build(server, "few", path)


def queries(path: Path) -> list[Query]:
    texts = [passage.text for passage in open_corpus(path)]
    return [
        asked(text) for text in (*texts[::9], *(" ".join(text.split()[:2]) for text in texts[::9]), "zzzz")
    ]


# ---------------------------------------------------------------------------------- what is found


@pytest.mark.slow
def test_passages_are_those_of_a_local_search_on_any_shards(server, few):
    path, found = few
    local = load_retriever(path, method="dense")
    here = local.search(queries(path))
    assert found.search(queries(path)) == here
    assert found.search([Query("", ())]) == [[]]
    like = MilvusCollection(server.url("few"), SECONDS).describe()
    assert like is not None and like.finished
    spread(server, "spread", path, like)
    other = load_retriever(url=server.url("spread"), method="dense")
    assert other.search(queries(path)) == here
    assert other.fingerprint == found.fingerprint, "answers of the one go on with the other"


@pytest.mark.slow
def test_equal_scores_stand_in_corpus_order(server, tmp_path):
    texts = ["emma rare words here"] + ["dune"] * 80 + ["dune by herbert"]
    path = write_jsonl_file(
        tmp_path / "corpus.jsonl", [{"id": f"p{n}", "contents": text} for n, text in enumerate(texts)]
    )
    passages = build(server, "equal", path, top_k=5).search([asked("dune"), asked("emma rare")])
    assert [p.id for p in passages[0]] == [f"p{n}" for n in range(1, 6)]
    assert passages[1][0].id == "p0"


# ---------------------------------------------------------------------------------- what is not there


def refused(url: str, says: str, **settings) -> None:
    start = time.perf_counter()
    with pytest.raises(UserError, match=re.escape(says)):
        load_retriever(url=url, **{"method": "dense"} | settings)
    assert time.perf_counter() - start < SECONDS, "no hang"


def changed(server: MilvusServer, name: str, **properties) -> str:
    """The URL of a copy of the facts of `few` with other properties, without passages."""
    from pymilvus import DataType

    client = server.client()
    known = client.describe_collection("few")["properties"]
    schema = client.create_schema(auto_id=False)
    schema.add_field("row", DataType.INT64, is_primary=True)
    schema.add_field("dense", DataType.FLOAT_VECTOR, dim=32)
    client.create_collection(name, schema=schema, properties=known | properties)
    return server.url(name)


@pytest.mark.slow
def test_what_is_no_collection_of_ours_is_refused(server, few):
    refused(server.url("fex"), "there is no such collection: build it with `dlm-rag index")
    refused(server.url("few"), "set retrieval.method=dense, not bm25", method="bm25")
    refused(server.url("few"), "holds vectors of embedding_model", passage_prompt="passage: ")
    refused(server.url("few"), "at most 16,384", top_k=20_000)
    refused(changed(server, "half", **{"dlm_rag.finished": "0"}), "half-built: finish it with `dlm-rag")
    refused(changed(server, "nobody", **{"dlm_rag.fingerprint": ""}), "was not built by this version")


@pytest.mark.slow
def test_a_collection_that_was_dropped_ends_the_run(server, corpus_file):
    found = build(server, "dropped", corpus_file, top_k=2)
    server.client().drop_collection("dropped")
    with pytest.raises(CorpusError, match="is no longer there"):
        found.search([asked("Who wrote Emma?")])


def give(found: CorpusRetriever, seconds: float) -> None:
    """From now on a search has so long."""
    found.corpus._seconds = seconds


@pytest.mark.slow
def test_a_server_that_hangs_is_left_alone_in_time(own_server, corpus_file, capfd):
    found = build(own_server, "small", corpus_file)
    own_server.pause()
    give(found, 0.9)
    with pytest.raises(SearchUnavailableError, match=own_server.url("small")):
        found.search([asked("Who wrote Emma?")])
    refused(own_server.url("small"), "does not answer as a Milvus does", timeout=1)
    own_server.resume()
    give(found, SECONDS)
    assert found.search([asked("Who wrote Emma?")])
    assert not capfd.readouterr().err


# ---------------------------------------------------------------------------------- building


def index(*words: str) -> None:
    dispatch(["index", *words, "retrieval.method=dense"])


@pytest.mark.slow
def test_index_builds_and_leaves_what_is_finished(server, corpus_file, capsys):
    url = server.url("built")
    index("--corpus", str(corpus_file), "--to", url)
    assert f"5 passages are in {url}, 5 of them new" in capsys.readouterr().err
    index("--corpus", str(corpus_file), "--to", url)
    assert "already, and it is finished" in capsys.readouterr().err
    questions, local = (
        [asked("Who wrote Emma?"), asked("zzzz")],
        load_retriever(corpus_file, method="dense", top_k=9),
    )
    found = load_retriever(url=url, method="dense", top_k=9).search(questions)
    assert found == local.search(questions), "all passages fit: the others follow"
    index("--corpus", str(corpus_file))
    assert "5 passages are indexed in" in capsys.readouterr().err


@pytest.mark.slow
def test_other_passages_are_refused(server, corpus_file, tmp_path):
    url = server.url("other")
    index("--corpus", str(corpus_file), "--to", url)
    other = write_jsonl_file(tmp_path / "other.jsonl", [entry(1, "another text")])
    with pytest.raises(CorpusError, match=r"holds other passages than .*other.jsonl"):
        index("--corpus", str(other), "--to", url)
    with pytest.raises(ConfigError, match="set retrieval.method=dense, not hybrid"):
        dispatch(["index", "--corpus", str(corpus_file), "--to", url, "retrieval.method=hybrid"])


def found_ids(server: MilvusServer, name: str) -> list[str]:
    """The ids of all entities by their keys, doubled ones twice."""
    found = server.client().query(name, filter="row >= 0", output_fields=["row", "id"])
    return [entity["id"] for entity in sorted(found, key=lambda entity: entity["row"])]


@pytest.mark.slow
def test_commands_that_look_at_passages_do_without(server, corpus_file, tmp_path, capsys):
    found = build(server, "seen", corpus_file, top_k=2)
    assert describe_corpus(Config(), found) == ((), "")
    tiny_denoiser().save_pretrained(model := tmp_path / "model", eos_token_id=257)
    byte_tokenizer().save_pretrained(model)
    row = {"question": "Who wrote Emma?", "golden_answers": ["Jane Austen"], "supporting_ids": ["emma"]}
    questions = write_jsonl_file(tmp_path / "questions.jsonl", [row])
    words = [f"questions={questions}", f"model.path={model}", f"out={tmp_path / 'out'}"]
    words += [f"retrieval.url={server.url('seen')}", "retrieval.method=dense", "decode.max_new_tokens=8"]
    dispatch(["evaluate", *words])
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())["settings"]
    (recall,) = (each["groups"]["all"]["recall_last"]["mean"] for each in scores.values())
    assert recall == 1.0


# ---------------------------------------------------------------------------------- kills


def command(*words: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.milvus_server", *words], env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


EVENTS = 6


class Chaos:
    """A retriever whose server is killed, and begins again, or stands still for a while, as it is asked."""

    def __init__(self, inner, server: MilvusServer, chance: random.Random) -> None:
        self._inner, self._server, self._chance = inner, server, chance
        self._mending = threading.Thread()
        self.events = 0

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def search(self, asked):
        if self.events < EVENTS and not self._mending.is_alive() and self._chance.random() < 0.5:
            kill = self.events % 2 == 0
            (self._server.kill if kill else self._server.pause)()
            self._mending = threading.Thread(target=self._mend, args=(kill, self._chance.uniform(0, 1.0)))
            self._mending.start()
            self.events += 1
        return self._inner.search(asked)

    def _mend(self, killed: bool, after: float) -> None:
        time.sleep(after)
        (self._server.start if killed else self._server.resume)()

    def wait(self) -> None:
        if self._mending.ident:
            self._mending.join()


@pytest.mark.slow
def test_a_server_that_is_killed_or_stopped_again_and_again_costs_no_answer(
    own_server, tmp_path, monkeypatch
):
    """Questions whose search failed are asked again by the same command; the answers are as without."""
    build(own_server, "world", WORLD / "corpus.jsonl")
    questions = read_questions(str(WORLD / "questions.jsonl"))[::20]

    def job(out: str):
        url = own_server.url("world")
        words = [f"out={tmp_path / out}", f"retrieval.url={url}", f"retrieval.timeout={SECONDS}"]
        words.append("retrieval.method=dense")
        return plan_answer_job(
            fill_in_shipped_files(load_config(None, [*words, "decode.batch_size=8"]), []), questions
        )

    here, chaos, failed = LocalEngines(), None, []
    job("calm.jsonl").run(here)
    while chaos is None or chaos.events < EVENTS or failed[-1]:
        wild = job("wild.jsonl" if chaos is None or failed[-1] else f"wild{len(failed)}.jsonl")
        if chaos is None:
            chaos = Chaos(wild.prepared.retriever, own_server, random.Random(0))
            give(wild.prepared.retriever, 0.5)
        wild.prepared = replace(wild.prepared, retriever=chaos)
        wild.run(here)
        chaos.wait()
        failed.append(wild.failed)
    assert any(failed), "not one search failed: this shows nothing"
    calm, *others = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(tmp_path.glob("*.jsonl"))
    ]
    for answers in (calm, *others):
        for answer in answers:
            answer.pop("seconds")
        assert sorted(answers, key=lambda answer: answer["id"]) == sorted(
            calm, key=lambda answer: answer["id"]
        )
    assert len(calm) == len(questions)


@pytest.mark.slow
def test_builds_that_are_killed_lose_nothing(own_server, tmp_path):
    """The program is killed, then the server, at random moments; the end is as without."""
    chance = random.Random(0)
    texts = [f"{chance.random()} word{n % 7} text of passage {n}" for n in range(3000)]
    path = write_jsonl_file(tmp_path / "corpus.jsonl", [entry(n, text) for n, text in enumerate(texts)])
    words = ["index", "--corpus", str(path), "--to", own_server.url("killed")]
    words.append("retrieval.method=dense")
    for kill in range(2):
        process = command(*words)
        time.sleep(chance.uniform(2.0, 4.0))
        if kill % 2:
            own_server.kill()
            process.communicate(timeout=120)
            own_server.start()
        else:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    last = command(*words)
    _, said = last.communicate(timeout=120)
    assert last.returncode == 0, said
    assert found_ids(own_server, "killed") == [f"p{n}" for n in range(3000)]
