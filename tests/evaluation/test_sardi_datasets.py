"""SARDI's data sets, in folders of exactly its layout: what is run and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dlm_rag.commands import evaluate
from dlm_rag.commands.evaluate import drop_incomplete_support
from dlm_rag.data.hub_datasets import list_dataset_files
from dlm_rag.questions import Question
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import Query
from dlm_rag.retrieval.corpus import open_corpus
from tests.support.tiny_models import byte_tokenizer, tiny_denoiser

CHECKPOINT = "checkpoints/sardi-dream-7b"  # a folder of that name stands for the published one


def lay_out(root: Path, dataset: str, texts: list[str], rows: list[dict]) -> Path:
    """The files of one data set as they are published; bm25s writes index and corpus.jsonl itself."""
    import bm25s
    import pyarrow
    from pyarrow import parquet

    folder = (root / "data" / list_dataset_files(dataset, "sardi")[0].path).parent
    (folder / "corpus").mkdir(parents=True)
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
    index.save(folder / "corpus" / "index_chunked", corpus=texts)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "test.parquet")
    return folder


@pytest.fixture
def laid_out(tmp_path, monkeypatch):
    """The whole layout with a random model of ours; the corpus lacks the support of the second question."""
    texts = [f"Book{n} was written by author{n}." for n in range(20)]
    rows = [
        {"question": "Who wrote book3?", "answer": "author3",
         "supporting_docs": [{"id": "3", "contents": texts[3]}]},
        {"question": "Who wrote book5?", "answer": "author5",
         "supporting_docs": [{"id": "doc-5", "contents": "Book 5 ..."}]},
    ]  # fmt: skip
    lay_out(tmp_path, "musique", texts, rows)
    tiny_denoiser().save_pretrained(tmp_path / CHECKPOINT, eos_token_id=257)
    byte_tokenizer().save_pretrained(tmp_path / CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_data_set_is_asked_with_its_own_corpus(laid_out):
    words = f"--config sardi.yaml --dataset musique --compare static --out runs --model {CHECKPOINT}"
    evaluate.main([*words.split(), "retrieval.top_k=2", "decode.max_new_tokens=12"])
    record = json.loads(Path("runs/scores.json").read_text())
    recall = record["settings"]["static"]["groups"]["all"]["recall_last"]
    assert recall["mean"] == 1.0, "of the question whose support is in the corpus alone"


@pytest.mark.slow
def test_the_published_setting_gives_the_published_steps(golden, tmp_path, monkeypatch):
    """The public system's own run on a tiny Dream, through this command and this layout."""
    expected = json.loads((golden / "traces" / "sardi.json").read_text())["questions"][:1]
    passages = [json.loads(line)["contents"] for line in (golden / "corpus.jsonl").open()]
    rows = [
        {"id": q["id"], "question": q["question"], "answer": q["golden_answers"][0], "supporting_docs": []}
        for q in expected
    ]
    lay_out(tmp_path, "2wiki", passages, rows)
    shutil.copytree(golden / "checkpoints" / "tiny-dream", tmp_path / CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    words = f"--config sardi.yaml --dataset 2wiki --model {CHECKPOINT} --out runs"
    evaluate.main(words.split())
    answers = {a["id"]: a for a in map(json.loads, Path("runs/answers.jsonl").read_text().splitlines())}
    for question in expected:
        assert answers[question["id"]]["response"] == question["text"]
        assert answers[question["id"]]["evidence"] == question["retrievals"][-1]["passages"]


def test_our_index_ranks_as_the_one_beside_the_corpus(tmp_path):
    import bm25s

    kinds = [(a, b, c) for a in ("red", "old") for b in ("house", "bridge") for c in ("Oslo", "Rome")]
    # no two score alike
    texts = [f"The {' '.join(kind)} {'and more ' * n}." for n, kind in enumerate(kinds)]
    index = lay_out(tmp_path, "cofca", texts, [{"question": "?"}]) / "corpus" / "index_chunked"
    theirs, corpus = bm25s.BM25.load(index, load_corpus=True), open_corpus(index / "corpus.jsonl")
    assert [p.contents for p in corpus] == texts
    retriever = load_retriever(index / "corpus.jsonl", top_k=3)
    for text in ("red house Oslo", "the bridge", "Rome old"):
        tokens = bm25s.tokenize(text, stopwords="en", show_progress=False)
        rows = theirs.retrieve(tokens, k=3, show_progress=False, return_as="documents")[0]
        (found,) = retriever.search([Query(text, (text,))])
        assert [passage.id for passage in found] == [str(row["id"]) for row in rows]


def test_support_that_the_corpus_lacks_is_not_counted(corpus):
    whole, part = (Question("a", "?", supporting_ids=ids) for ids in (("emma",), ("emma", "x")))
    assert drop_incomplete_support([whole, part], corpus) == [whole, replace(part, supporting_ids=())]
