"""Texts as people have them: other scripts, typography, documents in a row, notes with front matter."""

import gzip
import json
import math
from dataclasses import replace

import pytest

from dlm_rag.errors import ConfigError, CorpusError
from dlm_rag.evaluation.metrics import compute_evidence_recall
from dlm_rag.questions import Question, number_questions, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import Query, describe_missing_support, wrap_oracle
from dlm_rag.retrieval.bm25 import split_terms
from dlm_rag.retrieval.corpus import get_row_id, open_corpus
from dlm_rag.retrieval.text_folder import PASSAGE_LENGTH_CHARS
from tests.support.passages import write_jsonl_file

SCRIPTS = [
    (["北京是首都。", "长江是亚洲最长的河流。", "黄河注入渤海。"], "亚洲最长的河流是什么？"),
    (["東京は首都です。", "富士山は一番高い山です。", "琵琶湖は湖です。"], "一番高い山は何ですか"),
    (["กรุงเทพเป็นเมืองหลวง", "แม่น้ำเจ้าพระยาไหลผ่านกรุงเก่า", "ภูเขาทองอยู่ในวัด"], "แม่น้ำเจ้าพระยาอยู่ที่ไหน"),
    (["תל אביב היא עיר", "יְרוּשָׁלַיִם הִיא עִיר הַבִּירָה", "חיפה היא נמל"], "ירושלים הבירה"),
    (["القاهرة مدينة", "مُحَمَّدٌ كَتَبَ الكِتَابَ", "دمشق عاصمة"], "من كتب الكتاب محمد"),
    (["दिल्ली राजधानी है", "गंगा सबसे लंबी नदी है", "मुंबई बड़ा शहर है"], "सबसे लंबी नदी कौन सी है"),
    *((["می‌روند", "می‌خواهم", "می دانم"], asked) for asked in ("می‌خواهم", "میخواهم", "خواهم می")),
    (["سنة ١٩٣٠", "سنة ١٩٣١", "سنة ١٩٣٢"], "1931 ﻛﺘﺎﺏ"),
    (["a ﬁne day", "an oﬃce ﬁlm", "Ⅻ"], "office film"),
    (["서울은 수도이다", "한라산은 가장 높은 산이다", "부산은 항구이다"], "한라산이 높은가"),
    (["دمشق عاصمة", "القاهرة أكبر مدينة", "بيروت"], "القاهره اكبر"),
    (["Πάτρα", "Η Αθήνα είναι πόλη", "Σπάρτη"], "ΑΘΗΝΑ"),
    (["Ankara", "İstanbul'un tarihi", "İzmir"], "istanbul"),
    (["東京タワー", "スカイツリーの高さ", "富士山"], "ｽｶｲﾂﾘｰ"),
    (["Paris", "Café Zöe".replace("é", "e\u0301"), "Rome"], "café"),
    (["Paris is big", "Zürich is big", "Rome is big"], "zurich"),
    (["Ada", "The Brontë of Łódź", "Eve"], "Bronte"),
    (["Ada", "The Brontë of Łódź", "Eve"], "Lodz"),
    (["bún", "phở bò Việt", "Paris"], "pho viet"),
    (["Parisstrasse", "Bahnhofstrasse", "Stras"], "bahnhofstraße"),
    (["Oslo", "Ærøskøbing", "Aro"], "aeroskobing"),
]


@pytest.mark.parametrize(("texts", "question"), SCRIPTS)
def test_bm25_finds_every_script(tmp_path, texts, question):
    corpus = write_jsonl_file(
        tmp_path / "c.jsonl", [{"id": str(n), "contents": text} for n, text in enumerate(texts)]
    )
    for stemmer in ("none", "english"):
        settings = {"bm25_stemmer": stemmer, "index_dir": str(tmp_path / "index")}
        ((row,),) = load_retriever(str(corpus), **settings).rank([Query(question, (question,))], 1)
        assert row == 1


def test_terms_of_english_are_those_of_bm25s():
    assert split_terms("The Cat's  x 2nd_one, naïve") == ["the", "cat", "2nd_one", "naïve"]
    assert split_terms("東京Tower") == ["東京", "tower"]


PLAIN = 'Who directed "Harbour Lights"?'
FORMS = [
    PLAIN + "\n", "Who directed “Harbour Lights”?", 'Who directed "Harbour\u00a0Lights"?', "\ufeff" + PLAIN,
    'Who directed "Har\u00adbour Lights"?', "\u200b\u061c" + PLAIN + "\ufe0f", f"\x02{PLAIN}\x7f",
    'Who directed\u2028"Harbour Lights"?', PLAIN.replace("Har", "\U0001d407\U0001d41a\U0001d42b\u034f"),
    "".join(chr(ord(char) + 0xFEE0) if char.isalpha() else char for char in PLAIN),  # full-width
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_question_is_the_same_in_every_typography(tmp_path, form):
    (typed,) = number_questions([form])
    (read,) = read_questions(write_jsonl_file(tmp_path / "q.jsonl", [{"id": "1", "question": form}]))
    assert typed.question == read.question == Question("q", form).question == PLAIN


def test_truth_values_are_words(tmp_path):
    rows = [
        {"id": str(n), "question": "So?", "answer": answer}
        for n, answer in enumerate((True, [False], "True", 2.5))
    ]
    found = [q.golden_answers for q in read_questions(write_jsonl_file(tmp_path / "q.jsonl", rows))]
    assert found == [("yes",), ("no",), ("yes", "True"), ("2.5",)]


LONG = (
    " ".join(f"The town of Place{n} lies on the river Flow{n}." for n in range(100))
    + " Ada Quill directed it."
)


def test_documents_in_rows_are_cut_into_passages(tmp_path, caplog):
    rows = [{"id": "a", "title": "Short", "text": "A film."}, {"id": "b", "title": "Lamp", "text": LONG}]
    for _ in range(2):  # said again when it is kept from before
        caplog.clear()
        corpus = open_corpus(write_jsonl_file(tmp_path / "c.jsonl", rows), tmp_path / "index")
        assert "1 rows are longer than 4,000 characters" in caplog.text and "passages" in caplog.text
    passages = list(corpus)
    assert [p.id for p in passages[:3]] == ["a", "b", "b#2"]
    assert {p.title for p in passages} == {"Short", "Lamp"}
    assert max(len(p.contents) for p in passages) <= PASSAGE_LENGTH_CHARS[1]
    assert "Ada Quill" in passages[-1].contents


def test_a_large_file_that_is_smaller_as_json_lines_is_read_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("dlm_rag.retrieval.corpus.MAX_CUT_CORPUS_BYTES", 9000)
    whole = json.dumps([{"id": "b", "contents": LONG}]).encode() + b" " * 9000
    for name, data in {"c.json": whole, "c.json.gz": gzip.compress(whole)}.items():
        (tmp_path / name).write_bytes(data)
        assert [p.contents for p in open_corpus(tmp_path / name, tmp_path)] == [LONG]


def test_a_row_with_a_title_alone_is_its_title_and_a_blank_one_is_left_out(tmp_path, caplog):
    rows = [{"_id": "d1", "title": "Dover", "text": "A town."}, {"_id": "d2", "title": "Tea", "text": ""}]
    read = open_corpus(write_jsonl_file(tmp_path / "b.jsonl", rows), tmp_path)
    assert [p.contents for p in read] == ["A town.", "Tea"]
    null = [{"_id": "d1", "title": "Dover", "text": None}, {"_id": "d2", "title": math.nan, "text": "Tea"}]
    kilt = {"wikipedia_id": "9", "wikipedia_title": "Emma", "text": ["Emma\n", "A novel."]}
    read = open_corpus(write_jsonl_file(tmp_path / "e.jsonl", [*null, kilt]), tmp_path)
    assert [p.text for p in read] == ["Dover", "Tea", "Emma\nA novel.\n"]
    (tmp_path / "f.csv").write_bytes(b"id,title,Text\r1,Dover,A town.\r2,Tea,\r")  # an old line end
    assert [p.contents for p in open_corpus(tmp_path / "f.csv", tmp_path)] == ["A town.", "Tea"]
    (numbers,) = open_corpus(write_jsonl_file(tmp_path / "g.jsonl", [{"id": 1, "title": 1984, "text": 5}]))
    assert numbers.text == "1984\n5"
    blank = [*rows, {"_id": "d3", "title": "", "text": " "}]
    read = open_corpus(write_jsonl_file(tmp_path / "c.jsonl", blank), tmp_path)
    assert [p.id for p in read] == ["d1", "d2"]
    assert "1 rows without a text are left out" in caplog.text
    with pytest.raises(CorpusError, match="no passages"):
        open_corpus(write_jsonl_file(tmp_path / "d.jsonl", blank[2:]), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "---\ntitle: 'Ann''s Lights'\ntags: [film]\n---\n\nA film.\n", "Ann's Lights\n======\nA film.",
        '+++\ntitle = "Ann\'s Lights"\n+++\nA film.', "\n---\ntitle: Ann's Lights # x\n---\nA film.",
        '{\n  "title": "Ann\'s Lights",\n  "tags": []\n}\nA film.',
        "---\n" + "a:\n  title: b\n" * 250 + "title: Ann's Lights\n---\nA film.",
        "---\nog:type: a\n\"@id\": b\ntitle: Ann's Lights\nwho:\n- c: d\n---\nA film.",
        "---\ntitle: Ann's\n  Lights\n---\nA film.", '{\n"title": "Ann\\u0027s Lights"\n}\nA film.',
        " Ann's Lights\n ----\n\nA film.", "Ann's Lights\n=\nA film.", "# Ann's Lights {#id}\nA film.",
        "  ## [Ann's](http://x) **Lights** ##\nA film.", "<h1 id=a>Ann's <b>Lights</b></h1>\n\nA film.",
    ],
)  # fmt: skip
def test_front_matter_and_headings_give_titles(text, tmp_path):
    for ends in ("\n", "\r\n", "\r"):
        (notes := tmp_path / repr(ends)).mkdir()
        (notes / "a.md").write_bytes(text.replace("\n", ends).encode())
        (only,) = open_corpus(notes, tmp_path)
        assert (only.title, only.contents) == ("Ann's Lights", "A film.")


def test_a_heading_stands_behind_those_that_it_is_below(tmp_path):
    (notes := tmp_path / "notes").mkdir()
    text = (
        "---\ntitle: Films\n---\n# Emma\na\n## Cast\nb\n### Extras\nc\n\nDune\n===\nd\n<h2>Cast</h2>\n\ne"
    )
    (notes / "a.md").write_text(text)
    titles = ["Films: Emma", "Films: Emma: Cast", "Emma: Cast: Extras", "Films: Dune", "Films: Dune: Cast"]
    assert [(p.title, p.contents) for p in open_corpus(notes, tmp_path)] == [
        *zip(titles, "abcde", strict=True)
    ]
    long = f"{'a b ' * 5}a"
    (notes / "a.md").write_text(f"# {long}\n## Cast\na\n### Extras\nb\n# C# #\nc")  # eleven words
    assert [p.title for p in open_corpus(notes, tmp_path)] == [f"{long}: Cast", "Cast: Extras", "C#"]
    (notes / "a.md").write_text("---\ntitle: ~\n---\nf")
    assert [p.title for p in open_corpus(notes, tmp_path)] == ["a"]


def test_what_only_looks_like_front_matter_or_a_heading_is_text(tmp_path):
    (notes := tmp_path / "notes").mkdir()
    (notes / "a.md").write_text("---\nA rule.\n---\nMore.\n\n````\n```\n# no\n````\n")
    (only,) = open_corpus(notes, tmp_path)
    assert only.title == "a" and all(word in only.contents for word in ("A rule.", "More.", "# no"))
    (notes / "a.md").write_text("# A\n```npm install```\n## B\nMore.")
    assert [p.title for p in open_corpus(notes, tmp_path)] == ["A", "A: B"]
    (notes / "a.md").write_text("---\n\nNote: a rule.\n\nMore.\n\n---\n\nEnd.\n")
    assert (
        " ".join(p.contents for p in open_corpus(notes, tmp_path)).split()
        == "--- Note: a rule. More. --- End.".split()
    )


def test_a_list_that_nothing_closes_is_read_at_once(tmp_path):
    (notes := tmp_path / "notes").mkdir()
    (notes / "a.md").write_text("---\ndate: 2020\nwho:\n" + "- P: here: x\n" * 500 + "\nProse.\n")
    assert "".join(p.contents for p in open_corpus(notes, tmp_path)).count("P: here") == 500


def test_a_heading_with_nothing_below_it_is_text(tmp_path):
    """But for those that the next one stands below, and the title of the whole."""
    (notes := tmp_path / "notes").mkdir()
    (notes / "a.md").write_text(
        "# FAQ\n## Opened in 1931\n## Closed in 1950\nSold.\n## Call 1234\n# Staff\n## Anna\nx"
    )
    assert [(p.title, p.contents) for p in open_corpus(notes, tmp_path)] == [
        ("FAQ: Opened in 1931", "Opened in 1931"), ("FAQ: Closed in 1950", "Sold."),
        ("FAQ: Call 1234", "Call 1234"), ("Staff: Anna", "x"),
    ]  # fmt: skip


def test_supports_that_the_corpus_lacks_are_counted(tmp_path):
    rows = [{"id": 1, "title": "Dover", "text": "A town."}, {"id": 2, "title": "Tea", "text": "Leaves."}]
    corpus = open_corpus(write_jsonl_file(tmp_path / "c.jsonl", rows), tmp_path)
    there = Question("a", "x", supporting_ids=("1",)), Question("b", "x", supporting_titles=("Tea",))
    assert describe_missing_support(there, corpus) == ""
    lacking = (
        Question("c", "x", supporting_ids=("doc-3", "2")),
        Question("d", "x", supporting_titles=("Kent",)),
    )
    said = describe_missing_support((*there, *lacking), corpus)
    assert "2 of 5 supporting passages are not in the corpus" in said and "2 of 4 questions" in said
    assert "'doc-3'" in said and "JSON" not in said
    assert "JSON" in describe_missing_support([Question("e", "x", supporting_ids=("1,2",))], corpus)


def test_any_passage_of_a_row_counts_as_the_row(tmp_path):
    ids = ["a", "a#2", "a#41", "a#1", "a#0", "a#b", "a#2#3", "#2", "a#2\n"]
    assert [get_row_id(name) for name in ids] == ["a", "a", "a", "a", "a#0", "a#b", "a#2", "", "a#2\n"]
    assert compute_evidence_recall(["b#3", "c#2"], ["b", "c", "d"]) == pytest.approx(2 / 3)
    assert compute_evidence_recall(["emma.md#1"], ["emma.md"]) == 1.0, "of a folder"
    assert compute_evidence_recall(["b#3", "c"], ["b#2", "c#2"]) == 0.0, "a gold passage is that one alone"
    rows = [{"id": "a", "contents": "A film."}, {"id": "b", "contents": LONG}]
    inner = load_retriever(write_jsonl_file(tmp_path / "c.jsonl", rows), index_dir=tmp_path, top_k=4)
    asked = Question("q", "film", supporting_ids=("b", "a"))
    (found,) = wrap_oracle(inner, [asked], "question").search([Query("film", ("film",))])
    assert [passage.id for passage in found] == ["b", "a", "b#2", "b#3"]
    other = Question("q", "film", supporting_ids=("a",))
    with pytest.raises(ConfigError, match="supporting passages differ"):
        wrap_oracle(inner, [asked, replace(other, id="p")], "question")
