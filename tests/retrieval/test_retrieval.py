"""Retrievers: a batch of queries in, ranked passages out; nothing found is not a failure."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dlm_rag import load_retriever
from dlm_rag.config import RetrievalConfig, load_config
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.metrics import compute_evidence_recall
from dlm_rag.questions import Question, read_questions
from dlm_rag.retrieval.base import (
    HybridRetriever,
    MemoizedBatchFunction,
    Query,
    build_query,
    fuse_rankings,
    interleave_rankings,
    resolve_query_threshold,
    wrap_oracle,
)
from dlm_rag.retrieval.corpus import open_corpus
from dlm_rag.retrieval.dense import DenseRetriever
from tests.support.passages import write_jsonl_file
from tests.support.retrievers import list_passage_ids, make_letter_retriever, make_query


def test_a_query_that_finds_nothing_is_an_empty_list_beside_full_ones(corpus_file, tmp_path):
    asked = [make_query(text) for text in ("Tacoma", "the of and", "zzz", "")]
    assert list_passage_ids(load_retriever(corpus_file, top_k=4).search(asked)) == [["herbert"], [], [], []]
    stop_words = write_jsonl_file(
        tmp_path / "c.jsonl", [{"id": 1, "contents": "the"}, {"id": 2, "contents": "and"}]
    )
    assert list_passage_ids(load_retriever(stop_words, top_k=1).search(asked[1:])) == [[], [], []]


def test_top_k_beyond_the_corpus_takes_all_of_it_with_a_warning(corpus_file, caplog):
    retriever = load_retriever(corpus_file, top_k=50)
    assert "top_k=50, passages in the corpus: 5; all are used" in caplog.text
    found = list_passage_ids(retriever.search([make_query("Tacoma")]))[0]
    assert found[0] == "herbert" and len(found) == 5


def test_every_query_of_the_golden_traces_finds_the_same_passages(golden):
    retriever = load_retriever(golden / "corpus.jsonl", top_k=7)
    asked, expected = [], []
    for path in sorted((golden / "traces").glob("*.json")):
        for question in json.loads(path.read_text())["questions"]:
            asked += [make_query(r["query"]) for r in question["retrievals"]]
            expected += [r["passages"] for r in question["retrievals"]]
    assert len(asked) > 700
    assert list_passage_ids(retriever.search(asked)) == expected


def drawn(texts):
    """A unit vector of 48 numbers, and no more than 12 different ones: so many passages are equal."""
    rows = [np.random.default_rng(int(text) % 12).standard_normal(48) for text in texts]
    return torch.nn.functional.normalize(torch.tensor(np.array(rows), dtype=torch.float32), dim=-1)


@pytest.mark.parametrize("block_bytes", [1, 6 * 48 * 4, 1 << 20])
def test_equal_passages_stand_in_corpus_order_whatever_the_depth(monkeypatch, block_bytes):
    """Against float64: similarities that agree in six digits are equal. In blocks of any size."""
    monkeypatch.setattr("dlm_rag.retrieval.dense.SEARCH_BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(0)
    texts = [str(n) for n in rng.integers(0, 12, 130)]
    vectors = drawn(texts)
    retriever = DenseRetriever([None] * 130, 7, drawn, vectors.numpy(), torch.device("cpu"))
    queries = [make_query(str(n)) for n in range(12)]
    similarity = drawn([query.text for query in queries]).double() @ vectors.double().T
    rows = np.arange(130)
    expected = [np.lexsort((rows, -row.round(decimals=6).numpy())).tolist() for row in similarity]
    for depth in (1, 3, 7, 20, 64, 129, 130, 500):
        assert retriever.rank(queries, depth) == [ranking[:depth] for ranking in expected], depth


def test_dense_asks_part_by_part_and_the_parts_take_turns(corpus):
    retriever = make_letter_retriever(corpus, 3)
    alone = retriever.rank([make_query("Frank Herbert"), make_query("Steventon")], 5)
    both = retriever.rank([make_query("x", "Frank Herbert", "Steventon")], 3)
    assert both == [interleave_rankings(alone, 3)]
    assert retriever.rank([Query("", ())], 3) == [[]]


def test_what_is_remembered_is_right_in_many_threads_and_computed_by_one_at_a_time():
    """Though so little is kept that each call drops what another has just put there."""
    busy = threading.Lock()

    def squared(numbers):
        assert busy.acquire(blocking=False), "encoders and tokenizers bear one call at a time"
        time.sleep(0.0002)
        busy.release()
        return [n * n for n in numbers]

    remembered = MemoizedBatchFunction(squared, 5)
    asked = [[(7 * k + n) % 13 for n in range(1 + k % 6)] for k in range(200)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(remembered, asked)) == [[n * n for n in numbers] for numbers in asked]


def test_reciprocal_rank_fusion_and_taking_turns_by_hand():
    """1: 1/61 + 1/63; 2: 1/62 + 1/61; 3: 1/63; 4: 1/62. So 2, 1, 4, 3."""
    assert fuse_rankings([[1, 2, 3], [2, 4, 1]], 4, 3) == [2, 1, 4, 3]
    assert fuse_rankings([[1, 2], [2, 1]], 2, 2) == [1, 2], "ties go to the row that came first"
    assert fuse_rankings([[], []], 3, 3) == []
    rest = fuse_rankings([[1, 2, 3], [2, 4, 1, 5, 3]], 9, 2)
    assert rest == [2, 1, 4, 5, 3], "the rest as the last has them"
    assert interleave_rankings([[1, 2, 3], [2, 4], []], 9) == [1, 2, 4, 3]
    assert interleave_rankings([], 3) == []


@pytest.mark.parametrize("fusion_depth", [4, 50])
def test_the_best_of_a_hybrid_are_the_first_of_more(tmp_path, fusion_depth):
    """Among many equals, at depths on either side of what is fused."""
    words = "novel village born first published Hampshire".split()
    lines = [{"id": n, "contents": " ".join(words[: 1 + n % 6])} for n in range(60)]
    sparse = load_retriever(write_jsonl_file(tmp_path / "c.jsonl", lines), top_k=7)
    hybrid = HybridRetriever([sparse, make_letter_retriever(sparse.corpus, 7)], 7, fusion_depth)
    texts = (("a novel",), ("first published", "first", "published"), ("zebra",))
    queries = [make_query(*each) for each in texts]
    whole = hybrid.rank(queries, 60)
    assert all(sorted(ranking) == list(range(60)) for ranking in whole)
    for depth in (1, 3, 7, 30):
        assert hybrid.rank(queries, depth) == [ranking[:depth] for ranking in whole], depth


def recall_of_question_alone(retriever, folder):
    """Mean recall and share of questions with every supporting passage, in percent."""
    questions = read_questions(folder / "questions.jsonl")
    found = retriever.search([make_query(question.question) for question in questions])
    recalls = [
        compute_evidence_recall([p.id for p in passages], question.supporting_ids) or 0.0
        for passages, question in zip(found, questions, strict=True)
    ]
    whole = sum(recall == 1.0 for recall in recalls) / len(recalls)
    return 100 * sum(recalls) / len(recalls), 100 * whole


@pytest.mark.parametrize(
    ("name", "expected"), [("hotpotqa", (82.8, 66.7)), ("2wikimultihopqa", (71.2, 41.5))]
)
def test_bm25_recall_on_real_questions(real, name, expected):
    retriever = load_retriever(real / name / "corpus.jsonl", top_k=7)
    assert recall_of_question_alone(retriever, real / name) == pytest.approx(expected, abs=1.0)


@pytest.mark.slow
def test_dense_and_hybrid_recall_on_real_questions(real, minilm):
    folder = real / "hotpotqa"
    dense = load_retriever(folder / "corpus.jsonl", method="dense", embedding_model=minilm, top_k=7)
    assert recall_of_question_alone(dense, folder) == pytest.approx((82.5, 66.7), abs=1.0)
    hybrid = load_retriever(folder / "corpus.jsonl", method="hybrid", embedding_model=minilm, top_k=7)
    recall, _ = recall_of_question_alone(hybrid, folder)
    assert recall > 83.5, "fused, the two find more than either alone"


def test_vectors_of_other_weights_or_settings_under_the_same_name_are_not_used(
    corpus_file, minilm, tmp_path
):
    import shutil

    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(minilm, model)
    load_retriever(corpus_file, method="dense", embedding_model=str(model))
    folder = open_corpus(corpus_file).folder
    before = {path.name for path in folder.glob("dense-*") if path.is_dir()}
    weights = load_file(model / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    load_retriever(corpus_file, method="dense", embedding_model=str(model))
    pooling = model / "1_Pooling" / "config.json"
    text = pooling.read_text()
    changed = text.replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true')
    changed = changed.replace('"pooling_mode_mean_tokens": true', '"pooling_mode_mean_tokens": false')
    assert changed != text
    pooling.write_text(changed)
    load_retriever(corpus_file, method="dense", embedding_model=str(model))
    after = {path.name for path in folder.glob("dense-*") if path.is_dir()}
    assert len(before) == 1 and len(after) == 3


def test_words_of_parts_takes_turns_of_a_search_for_each_part(corpus_file):
    """By hand: what bm25 finds for each part, the best of each first; the whole query finds otherwise."""
    parts = ("novel by Frank Herbert", "Jane Austen was born in", "village in Hampshire")
    query = Query(" ".join(parts), parts)
    whole = load_retriever(corpus_file, top_k=3)
    by_parts = load_retriever(corpus_file, top_k=3, bm25_query="sentences")
    assert list_passage_ids(by_parts.search([query])) == [["dune", "austen", "steventon"]]
    alone = [whole.rank([make_query(part)], 3)[0] for part in parts]
    for _ in range(2):  # the second time from memory
        found = by_parts.rank([query, make_query("zzz"), make_query(parts[0]), Query("", ())], 3)
        assert found == [interleave_rankings(alone, 3), [], alone[0], []]
    assert whole.rank([query], 3) != by_parts.rank([query], 3)


def test_the_passage_of_a_title_comes_before_those_that_name_it_more_often(tmp_path):
    texts = [
        "Persona (film)\nIngmar Bergman wrote it.",
        "Ingmar Bergman (Director)\nA Swede of many works.",
    ]
    rows = [{"id": str(n), "contents": text} for n, text in enumerate([*texts, "Sweden\nA land."])]
    corpus = write_jsonl_file(tmp_path / "films.jsonl", rows)
    for kind, best in (("whole", ["0", "1"]), ("sentences", ["1", "0"])):
        retriever = load_retriever(corpus, top_k=2, bm25_query=kind)
        assert list_passage_ids(retriever.search(["Ingmar  bergman"])) == [best]


def test_of_a_clear_choice_alone_is_read(tmp_path, monkeypatch):
    """By hand: what is near enough, or has a title of the question; of each title one passage more."""
    texts = {
        "rock": "Rock\nGranite is a rock of quartz and feldspar.",
        "hill": "Hill\nA hill of granite and quartz.",
        "quartz": "Quartz (mineral)\nIt is hard.",
        "other": "Rock\nGranite is old.",
    }
    rows = [{"id": name, "contents": text} for name, text in texts.items()]
    rows += [{"id": f"{n}", "contents": f"{n}"} for n in range(9)]
    corpus = write_jsonl_file(tmp_path / "stones.jsonl", rows)
    parts = ("feldspar granite rock quartz", "Hill", "Rock")
    query = Query(" ".join(parts), parts)
    for ratio, kind, found in (
        (0.9, "sentences", ["rock", "hill", "quartz"]), (0.9, "whole", ["rock", "hill", "quartz"]),
        (0.01, "sentences", ["rock", "other", "hill", "quartz"]),
    ):  # fmt: skip
        for most in (4, 50):  # also where the whole corpus would fit
            retriever = load_retriever(corpus, top_k=most, bm25_query=kind, min_score_ratio=ratio)
            assert list_passage_ids(retriever.search([query])) == [found], (ratio, kind, most)
        assert retriever.search(["zzz"]) == [[]]
    told = Question("a", query.parts[0], supporting_ids=("rock",))
    oracle = wrap_oracle(load_retriever(corpus, top_k=50, min_score_ratio=0.9), [told], "question")
    assert list_passage_ids(oracle.search([query])) == [["rock", "hill", "quartz"]]
    letters = "dlm_rag.retrieval.dense.open_dense_retriever"  # of both together nothing is left out
    monkeypatch.setattr(letters, lambda config, corpus: make_letter_retriever(corpus, 4))
    configs = (RetrievalConfig(method="hybrid", top_k=4, min_score_ratio=ratio) for ratio in (0.0, 0.9))
    whole, clear = (load_retriever(config, corpus).search([query]) for config in configs)
    assert whole == clear


def test_stems_are_one_term_and_words_of_titles_count_more_often(tmp_path):
    texts = {"tower": "Old tower\nIt costs four coins.", "fees": "Fees\nThe cost of the old roof: four."}
    rows = [{"id": name, "contents": text} for name, text in texts.items()]
    rows += [{"id": f"{n}", "contents": f"Hill {n}\n{n} {n}"} for n in range(9)]
    corpus = write_jsonl_file(tmp_path / "towers.jsonl", rows)

    def search(query, **settings):
        retriever = load_retriever(corpus, top_k=2, **settings)
        return {passage.id: score for passage, score in retriever.search_scored([make_query(query)], 2)[0]}

    assert [*search("cost of four coin")] == ["fees", "tower"]
    assert [*search("coin of four cost", bm25_stemmer="english")] == ["tower", "fees"]
    assert search("fees", bm25_title_weight=3)["fees"] > search("fees")["fees"]


OWN_RETRIEVER = """
from dlm_rag.retrieval.base import CorpusRetriever

class LongestFirst(CorpusRetriever):
    def rank(self, queries, depth):
        rows = sorted(range(len(self.corpus)), key=lambda row: -len(self.corpus[row].text))
        return [rows[:depth] for _ in queries]

def load(config, corpus):
    return LongestFirst(corpus, config.top_k)
"""


def test_a_retriever_of_ones_own_is_named_on_the_command_line(corpus_file, tmp_path, monkeypatch):
    """One file of 9 lines, and nothing of the package is changed."""
    (tmp_path / "longest_first.py").write_text(OWN_RETRIEVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    words = [f"retrieval.corpus={corpus_file}", "retrieval.method=longest_first:load", "retrieval.top_k=2"]
    config = load_config(None, words).retrieval
    retriever = load_retriever(config, open_corpus(corpus_file))
    lengths = {passage.id: len(passage.text) for passage in retriever.corpus}
    longest = sorted(lengths, key=lengths.get)[:-3:-1]
    assert list_passage_ids(retriever.search([make_query("x")])) == [longest]
    with pytest.raises(ConfigError, match=r"retrieval\.method=longest_first:other cannot be imported"):
        load_retriever(config, retriever.corpus, method="longest_first:other")
    (tmp_path / "ends.py").write_text("raise SystemExit(0)")
    (tmp_path / "fails.py").write_text("1 / 0")
    wrong = {":x": "full name", "..x:y": "full name", "ends:x": "SystemExit", "fails:x": "division"}
    for path, reason in wrong.items():
        with pytest.raises(ConfigError, match=f"cannot be imported: .*{reason}"):
            load_retriever(config, retriever.corpus, method=path)
    odd = {"string:digits": "is str, not a function", "os:getcwd": "does not take 2 arguments: too many"}
    for path, reason in {**odd, "builtins:print": "returned NoneType, no Retriever"}.items():
        with pytest.raises(ConfigError, match=f"method={path} {reason}"):
            load_retriever(config, retriever.corpus, method=path)
    for path, reason in {"os:getcwd": "take 3 arguments", "builtins:print": "returned NoneType"}.items():
        with pytest.raises(ConfigError, match=f"decode.query_policy={path} .*{reason}"):
            build_query(path, "Who?")
    with pytest.raises(ConfigError, match=r"method=.*bm52.*nearest: 'bm25'"):
        load_retriever(config, retriever.corpus, method="bm52")


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("proxy", " Emma was written by Jane."), ("committed", " Emma was written by Jane."),
        ("question", ""), ("feedback", " Emma A novel."), ("two_rounds", " Emma A novel."),
    ],
)  # fmt: skip
def test_what_each_policy_asks(policy, text):
    query = build_query(policy, " Who wrote  it?", " Emma  was was written\nby Jane. ", "Emma\nA novel.")
    assert query.text == f"Who wrote it?{text}"


def test_the_question_keeps_its_repeated_words_the_rest_does_not():
    assert build_query("proxy", "was it was it", "it was it").text == "was it was it it was"


def test_parts_are_the_question_and_each_sentence_once():
    query = build_query("proxy", "Who?", "A wrote B. B was C. A wrote B. ### C")
    assert query.parts == ("Who?", "A wrote B.", "B was C.", "C")
    assert build_query("feedback", "Who?", "", "A wrote; B Ca").parts == ("Who?", "A wrote; B Ca")
    assert build_query("proxy", "Who?", "A wrote; B Ca").parts == ("Who?", "A wrote", "Who? B Ca")
    assert build_query("proxy", "Who?", "A wrote; B Ca ###").parts == ("Who?", "A wrote", "B Ca")
    assert build_query("proxy", "Who?", "E. E. Ca; Dr. No ###").parts == ("Who?", "E. E. Ca", "Dr. No")
    prose = "A wrote; that it was so in all of the towns that B has ever seen. Then C said"
    assert build_query("proxy", "Who?", prose).parts[2:] == (prose[9:-12], "Who? Then C said")


def test_guesses_enter_from_the_query_threshold_on_and_never_at_one():
    assert resolve_query_threshold("proxy", 0.0) == 0.0 and resolve_query_threshold("proxy", 0.4) == 0.4
    assert resolve_query_threshold("proxy", 1.0) > 1 and resolve_query_threshold("committed", 0.0) > 1
