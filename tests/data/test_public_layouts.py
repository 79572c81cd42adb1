"""Public layouts of questions, as people have the files: originals, the hub's parquet, FlashRAG, SARDI."""

import csv
import io
import json
from dataclasses import replace

import pytest

from dlm_rag.errors import CorpusError, QuestionError
from dlm_rag.evaluation.metrics import compute_support_recall
from dlm_rag.questions import Question, as_questions, read_questions
from dlm_rag.retrieval import load_retriever
from dlm_rag.retrieval.base import Query, wrap_oracle
from dlm_rag.retrieval.corpus import get_row_id, open_corpus

VESK, ORRA = ["Vesk", ["Vesk is a river.", " It ends in Orra."]], ["Orra", ["Orra is a lake."]]
TULM, PARN = ["Tulm", ["Tulm wrote Parn."]], ["Parn (novel)", ["Parn is a novel.", "It has a sea."]]
HOTPOT = {
    "_id": "5a8b57f25542995d1e6f1371", "question": "Where does the river Vesk end?", "answer": "Orra",
    "supporting_facts": [["Vesk", 1], ["Orra", 0], ["Vesk", 0]], "context": [VESK, TULM, ORRA],
    "type": "bridge", "level": "hard",
}  # fmt: skip
TWOWIKI = {
    "_id": "8813f87c0bdd11eba7f7acde48001122", "type": "compositional", "answer": "Parn",
    "question": "What did the author of Parn write?", "context": [TULM, PARN, VESK],
    "supporting_facts": [["Tulm", 0], ["Parn (novel)", 0]],
    "evidences": [["Parn", "author", "Tulm"], ["Tulm", "wrote", "Parn"]],
    "evidences_id": [["Q1", "author", "Q2"], ["Q2", "wrote", "Q1"]], "answer_id": "Q1",
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__482757_12019", "question": "Where does the river of Tulm end?", "answer": "Lake Orra",
    "paragraphs": [
        {"idx": 0, "title": "Vesk", "paragraph_text": "Vesk is a river of Tulm.", "is_supporting": True},
        {"idx": 1, "title": "Parn", "paragraph_text": "Parn is a novel.", "is_supporting": False},
        {"idx": 2, "title": "Orra", "paragraph_text": "Vesk ends in Orra.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"id": 482757, "question": "Tulm >> river", "answer": "Vesk", "paragraph_support_idx": 0},
        {"id": 12019, "question": "Where does #1 end?", "answer": "Orra", "paragraph_support_idx": 2},
    ],
    "answer_aliases": ["Orra", "Lake Orra"], "answerable": True,
}  # fmt: skip
BAMBOOGLE = [
    ("Who led the land of Vesk when Parn, the novel, appeared?", 'Tulm "the Old"'),
    ("When did it?", "1815"),
]
HOTPOT_READ = Question(
    HOTPOT["_id"], HOTPOT["question"], ("Orra",), hops=2, labels=("bridge",),
    supporting_titles=("Vesk", "Orra"),
)  # fmt: skip
TWOWIKI_READ = Question(
    TWOWIKI["_id"], TWOWIKI["question"], ("Parn",), hops=2, labels=("compositional",),
    supporting_titles=("Tulm", "Parn (novel)"),
)  # fmt: skip
MUSIQUE_READ = Question(
    MUSIQUE["id"], MUSIQUE["question"], ("Lake Orra", "Orra"), hops=2, supporting_titles=("Vesk", "Orra"),
)  # fmt: skip
BAMBOOGLE_READ = [Question(str(n), q, (a,)) for n, (q, a) in enumerate(BAMBOOGLE, start=1)]


def changed(row, drop=(), **values):
    return {key: value for key, value in (row | values).items() if key not in drop}


def column_form(row):
    """As the hub's `datasets` store nested lists in Parquet: an object of columns."""
    facts, context = zip(*row["supporting_facts"], strict=True), zip(*row["context"], strict=True)
    return changed(
        row, ("_id", "evidences", "evidences_id"), id=row["_id"],
        supporting_facts=dict(zip(("title", "sent_id"), map(list, facts), strict=True)),
        context=dict(zip(("title", "sentences"), map(list, context), strict=True)),
    )  # fmt: skip


def text_form(row):
    """As 2WikiMultihopQA's parquet on the hub: JSON in texts."""
    names = ("supporting_facts", "context", "evidences")
    return changed(row, ("evidences_id",), **{name: json.dumps(row.get(name, [])) for name in names})


def flashrag(number, question, answers, **metadata):
    return {"id": f"dev_{number}", "question": question, "golden_answers": answers, "metadata": metadata}


def flashrag_form(row, content="sentences"):
    columns = column_form(row)
    context = {"title": columns["context"]["title"], content: columns["context"]["sentences"]}
    more = {"type": row["type"], "level": "hard", "supporting_facts": columns["supporting_facts"]}
    return flashrag(0, row["question"], [row["answer"]], **more, context=context)


def as_json(rows):
    return json.dumps(rows).encode()


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_parquet(rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def as_table(header, rows, delimiter=","):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([header, *rows])
    return text.getvalue().encode()


def hop_case(name, hops, steps):
    row = changed(MUSIQUE, id=name, question_decomposition=MUSIQUE["question_decomposition"][:1] * steps)
    return "musique_ans_v1.0_dev.jsonl", as_lines([row]), [replace(MUSIQUE_READ, id=name, hops=hops)]


def type_case(kind, hops):
    read = replace(TWOWIKI_READ, hops=hops, labels=(kind,))
    return "dev.json", as_json([changed(TWOWIKI, type=kind)]), [read]


NO_GOLD = Question(HOTPOT["_id"], HOTPOT["question"])
FLASHRAG_HOTPOT, FLASHRAG_2WIKI = (replace(read, id="dev_0") for read in (HOTPOT_READ, TWOWIKI_READ))
STEPS = [
    {"question": "Tulm >> river", "answer": "Vesk",
     "support_paragraph": {"title": title, "paragraph_text": "x"}} for title in ("Vesk", "Orra", "Tulm")
]  # fmt: skip
SARDI = {"id": "s1", "question": "Where does Vesk end?", "answer": "Orra"}
UNSEEN = ("answer", "answer_aliases", "question_decomposition", "answerable")  # of the questions of a test
GIVEN = MUSIQUE["paragraphs"]
TRIVIA = {
    "Answer": {"Value": "Tulm", "Aliases": ["Tulm", "A. Tulm"]},
    "Question": "Who?",
    "QuestionId": "tc_8",
}
TRIVIA_READ = Question("tc_8", "Who?", ("Tulm", "A. Tulm"))
# As published, and as the hub has it.
ASKED = {"id": "56be", "question": "Who wrote Parn?", "is_impossible": False}
SQUAD = ASKED | {"answers": [{"text": "Tulm", "answer_start": 8}, {"text": "Tulm", "answer_start": 8}]}
SQUAD_ROW = ASKED | {"title": "Tulm", "context": "Parn is by Tulm.", "answers": {"text": ["Tulm"]}}
PARAGRAPHS = [
    {"qas": [SQUAD], "context": "Parn is by Tulm."},
    {"qas": [{**ASKED, "id": "56bf", "is_impossible": True, "answers": []}], "context": "Orra is a lake."},
]
SQUAD_FILE = {"version": "v2.0", "data": [{"title": "Tulm", "paragraphs": PARAGRAPHS}]}
CHOICES = ["Orra", "Tulm", "1"]
CASES = {
    "squad": ("dev-v2.0.json", as_json(SQUAD_FILE), [Question("56be", "Who wrote Parn?", ("Tulm",))]),
    **{f"choices {n}": ("q.jsonl", as_lines([{"id": "a", "question": "Who?", **row}]),
     [Question("a", "Who?", ("Tulm",) if row.get("answer") != "1" else ("1",))]) for n, row in enumerate((
        {"choices": CHOICES, "answer": 1}, {"options": CHOICES, "answer": "B"},
        {"choices": CHOICES, "answer": "1"}, {"answer": "It is by Tulm.\n#### Tulm"},
        {"options": dict(zip("ABC", CHOICES, strict=True)), "answer": "B"},
        {"choices": None, "options": CHOICES, "answer": "B"},
        {"metadata": {"choices": json.dumps(CHOICES)}, "answer": 1},
        {"choices": {"text": CHOICES, "label": ["2", "1", "3"]}, "answerKey": "1"},
        {**dict(zip("ABC", CHOICES, strict=True)), "Answer": "B"},  # MMMLU
        {"options": "[A] Orra [B] Tulm", "answer": "Tulm"},
     ))},
    "hotpotqa distractor": ("hotpot_dev_distractor_v1.json", as_json([HOTPOT]), [HOTPOT_READ]),
    "hotpotqa fullwiki test": ("hotpot_test_fullwiki_v1.json",
     as_json([changed(HOTPOT, ("answer", "supporting_facts", "type", "level"))]),
     [NO_GOLD]),
    "hotpotqa hub parquet": ("validation-00000-of-00001.parquet", as_parquet([column_form(HOTPOT)]),
     [HOTPOT_READ]),
    "hotpotqa csv": ("hotpot.csv",
     as_table(list(HOTPOT), [[v if isinstance(v, str) else json.dumps(v) for v in HOTPOT.values()]]),
     [HOTPOT_READ]),
    "titles alone": ("hotpot.json", as_json([changed(HOTPOT, supporting_facts=["Vesk", "Orra"])]),
     [HOTPOT_READ]),
    "2wiki": ("dev.json", as_json([TWOWIKI]), [TWOWIKI_READ]),
    "2wiki hub parquet": ("dev.parquet", as_parquet([text_form(TWOWIKI)]), [TWOWIKI_READ]),
    "2wiki test": ("test.json", as_json([changed(TWOWIKI, supporting_facts=[], evidences=[], answer="")]),
     [Question(TWOWIKI["_id"], TWOWIKI["question"], hops=2, labels=("compositional",))]),
    "2wiki comparison": type_case("comparison", 2),
    "2wiki bridge_comparison": type_case("bridge_comparison", 4),
    "musique": ("musique_ans_v1.0_dev.jsonl", as_lines([MUSIQUE]), [MUSIQUE_READ]),
    "musique hub parquet": ("musique.parquet", as_parquet([MUSIQUE]), [MUSIQUE_READ]),
    "musique full": ("musique_full_v1.0_dev.jsonl", as_lines([MUSIQUE, changed(MUSIQUE, answerable=False)]),
     [MUSIQUE_READ]),
    "musique test": ("musique_ans_v1.0_test.jsonl",
     as_lines([changed(MUSIQUE, UNSEEN, paragraphs=[changed(p, ["is_supporting"]) for p in GIVEN])]),
     [Question(MUSIQUE["id"], MUSIQUE["question"], hops=2)]),
    "musique 3hop1": hop_case("3hop1__305282_282081_73772", 3, 3),
    "musique 4hop1": hop_case("4hop1__152562_5274_458768_33637", 4, 4),
    "musique other ids": hop_case("q7", 3, 3),
    "bamboogle": ("Bamboogle Prerelease - Sheet1.csv", as_table(["Question", "Answer"], BAMBOOGLE),
     BAMBOOGLE_READ),
    "names as they are written first": ("q.jsonl",
     as_lines([{"id": "a", "question": "Who?", "Question": "x", "Answers": ["y"], "answer": "z"}]),
     [Question("a", "Who?", ("z",))]),
    "bamboogle numbered": ("bamboogle.csv",
     as_table(["ID", "Question", "Answer"], [(f"b{n}", *row) for n, row in enumerate(BAMBOOGLE)]),
     [Question(f"b{n}", q, (a,)) for n, (q, a) in enumerate(BAMBOOGLE)]),
    "flashrag hotpotqa": ("dev.jsonl", as_lines([flashrag_form(HOTPOT)]), [FLASHRAG_HOTPOT]),
    "flashrag 2wiki": ("dev.jsonl", as_lines([flashrag_form(TWOWIKI, "content")]), [FLASHRAG_2WIKI]),
    "flashrag musique": ("dev.jsonl",
     as_lines([flashrag(3, "Where?", ["Orra", "the Orra"], question_decomposition=STEPS)]),
     [Question("dev_3", "Where?", ("Orra", "the Orra"), hops=3,
               supporting_titles=("Vesk", "Orra", "Tulm"))]),
    "popqa original": ("popQA.tsv",
     as_table(["id", "subj", "prop", "question", "possible_answers"],
              [["4222362", "Parn", "author", "Who wrote Parn?", '["Tulm", "A. Tulm"]']], "\t"),
     [Question("4222362", "Who wrote Parn?", ("Tulm", "A. Tulm"))]),
    "triviaqa original": ("verified-wikipedia-dev.json",
     json.dumps({"Data": [TRIVIA], "Domain": "Web", "Version": 1.0}).encode(),
     [TRIVIA_READ]),
    "triviaqa csv": (
        "dev.csv",
        as_table(["question_id", "question", "answer"],
                 [["tc_8", "Who?", '{"value": "Tulm", "aliases": ["A. Tulm"]}']], ","),
        [TRIVIA_READ],
    ),
    "triviaqa hub parquet": (
        "validation.parquet",
        as_parquet([{"question": "Who?", "question_id": "tc_8",
                     "answer": {"aliases": ["A. Tulm"], "normalized_aliases": ["tulm"], "value": "Tulm"}}]),
        [TRIVIA_READ],
    ),
    "strategyqa": (
        "dev.json",
        json.dumps([{"qid": "b86", "question": "Is Emma a novel?", "answer": True}]).encode(),
        [Question("b86", "Is Emma a novel?", ("yes",))],
    ),
    "ms marco": (
        "dev.jsonl",
        as_lines([{"query": "Who wrote Emma?", "query_id": 15, "answers": ["Austen"]}]),
        [Question("15", "Who wrote Emma?", ("Austen",))],
    ),
    "sardi titles": (
        "test.parquet",
        as_parquet([SARDI | {"supporting_docs": [{"contents": '"Vesk"\nVesk ends in Orra.'},
                                                 {"contents": '"Orra"\nA lake.'}]}]),
        [Question("s1", SARDI["question"], ("Orra",), supporting_titles=("Vesk", "Orra"))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_public_layout_is_read_as_it_is(tmp_path, case):
    name, content, expected = CASES[case]
    (tmp_path / name).write_bytes(content)
    assert read_questions(tmp_path / name) == expected


def test_a_dict_is_read_as_a_row_of_a_file(tmp_path):
    facts = [{"answer": "Tulm", "provenance": [{"title": "Parn (novel)"}]}, {"answer": "A. Tulm"}]
    rows = [
        flashrag_form(HOTPOT), flashrag(3, "Where?", ["Orra"], question_decomposition=STEPS),
        {"id": "k", "input": "Who wrote Parn?", "output": facts},  # KILT
        {"qid": "b86", "question": "Is Emma a novel?", "answer": True},  # StrategyQA
        {"id": "c", "question": "Who?", "choices": json.dumps(CHOICES), "answer": 1},
    ]  # fmt: skip
    for row in rows:
        (tmp_path / "q.jsonl").write_bytes(as_lines([row]))
        assert as_questions(dict(row)) == read_questions(tmp_path / "q.jsonl")
    assert as_questions({"qid": None, "question": "Who?"})[0].id == "q1"


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ([["Vesk"]], "must be pairs"),
        ("Vesk", "must be pairs"),
        ({"title": ["a"], "sent_id": []}, "must be"),
    ],
)
def test_support_in_another_layout_is_refused(tmp_path, facts, says):
    (tmp_path / "dev.json").write_bytes(as_json([changed(HOTPOT, supporting_facts=facts)]))
    with pytest.raises(QuestionError, match=f"item 1: 'supporting_facts' {says}"):
        read_questions(tmp_path / "dev.json")


MORE = changed(MUSIQUE, id="3hop1__1_2_3", paragraphs=[
    {"idx": 0, "title": "Vesk", "paragraph_text": "Vesk is also a town.", "is_supporting": True},
    *MUSIQUE["paragraphs"][1:],
])  # fmt: skip


RIVER = ("Vesk", "Vesk is a river. It ends in Orra.")
NOVEL = ("Parn (novel)", "Parn is a novel. It has a sea.")
AUTHOR, LAKE = ("Tulm", "Tulm wrote Parn."), ("Orra", "Orra is a lake.")
PARTS = [
    ("Vesk", "Vesk is a river of Tulm."), ("Parn", "Parn is a novel."), ("Orra", "Vesk ends in Orra."),
    ("Vesk#2", "Vesk is also a town."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("h.json", as_json([HOTPOT, changed(TWOWIKI, question="?")]), [RIVER, AUTHOR, LAKE, NOVEL]),
        ("f.jsonl", as_lines([flashrag_form(TWOWIKI, "content")]), [AUTHOR, NOVEL, RIVER]),
        ("m.jsonl", as_lines([MUSIQUE, MORE]), PARTS),
        ("s.json", as_json(SQUAD_FILE), [("Tulm", "Parn is by Tulm."), ("Tulm#2", "Orra is a lake.")]),
        ("s.jsonl", as_lines([SQUAD_ROW]), [("Tulm", "Parn is by Tulm.")]),
    ],
)
def test_the_passages_that_come_with_questions_are_a_corpus(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    corpus = open_corpus(tmp_path / name, tmp_path / "index")
    assert [(passage.id, passage.contents) for passage in corpus] == expected
    assert all(passage.title == passage.id.partition("#")[0] for passage in corpus)


def test_questions_without_passages_are_no_corpus(tmp_path):
    (tmp_path / "b.csv").write_bytes(as_table(["Question", "Answer"], BAMBOOGLE))
    with pytest.raises(CorpusError, match="line 2: no passages come with this question"):
        open_corpus(tmp_path / "b.csv", tmp_path / "index")


def test_recall_by_title_counts_any_passage_of_a_title():
    asked = Question("a", "?", supporting_titles=('"Vesk"', "R&amp;D"))
    texts = {"1": '"Vesk"\nfirst', "2": "Vesk\nsecond", "3": "R&D\nx", "4": "Vesk is a river"}
    for evidence, expected in {("4",): 0.0, ("1",): 0.5, ("1", "2"): 0.5, ("2", "3"): 1.0, (): 0.0}.items():
        assert compute_support_recall(evidence, texts, asked) == expected
    by_id = Question("a", "?", supporting_ids=("4",), supporting_titles=("Vesk",))
    assert compute_support_recall(["4"], texts, by_id) == 1.0, "ids say it more exactly"
    assert compute_support_recall(["4"], texts, Question("a", "?")) is None


def test_recall_by_title_is_recall_by_id_where_titles_are_unique(real):
    name = "2wikimultihopqa"
    retriever = load_retriever(real / name / "corpus.jsonl", top_k=7)
    titles = {passage.id: passage.title for passage in retriever.corpus}
    rows = {get_row_id(name) for name in titles}
    assert len({*titles.values()}) == len(rows)
    questions = read_questions(real / name / "questions.jsonl")
    results = retriever.search([Query(q.question, (q.question,)) for q in questions])
    for question, found in zip(questions, results, strict=True):
        ids, texts = [p.id for p in found], {p.id: p.text for p in found}
        named = tuple(titles[i] for i in question.supporting_ids)
        by_title = replace(question, supporting_ids=(), supporting_titles=named)
        assert compute_support_recall(ids, texts, by_title) == compute_support_recall(ids, texts, question)


def test_oracle_evidence_by_titles(tmp_path):
    """Titles take turns where they have several passages, as in a Wikipedia cut into parts."""
    lines = [
        {"id": n, "contents": f'"{title}"\npart {n}'}
        for n, title in enumerate(["Vesk", "Vesk", "Tulm", "Orra"])
    ]
    (tmp_path / "c.jsonl").write_bytes(as_lines(lines))
    inner = load_retriever(tmp_path / "c.jsonl", top_k=3)
    asked = Question("a", "part 2", supporting_titles=("Orra", "Vesk"))
    (found,) = wrap_oracle(inner, [asked], "question").search([Query("part 2", ("part 2",))])
    assert [passage.id for passage in found] == ["3", "0", "1"]
