"""Another model as writer, behind a real server in a process of its own."""

import json
from collections import Counter

import pytest

from dlm_rag.baselines import chat_client
from dlm_rag.baselines.chat_client import Completion
from dlm_rag.commands import synthesize
from dlm_rag.questions import Question, read_questions
from dlm_rag.synthesis.llm_writer import check_paraphrase
from tests.support.chat_server import server as chat_server  # noqa: F401 - a fixture
from tests.support.passages import write_jsonl_file

SAID = '"Please say: {last line}"'
BUSY = {"status": 503, "text": "overloaded"}
RULES = [
    ("busy", [BUSY, BUSY, SAID]),
    ("broken", [{"raw": ""}, SAID]),
    ("forbidden", [{"status": 400, "text": "this prompt is too long"}]),
    ("endless", [{"text": SAID, "finish": "length"}]),
    ("slow", [{"text": SAID, "wait": 30}]),
    (r"Question: other[^\n]*$", ["Question: Who?"]),
    (r"Question: same[^\n]*$", ["{last line}"]),
    ("", [SAID]),
]


@pytest.fixture
def server(chat_server):
    chat_server.say(*RULES, models=["tiny-writer"])
    return chat_server


TINY = ["synthesis.method=writer", "synthesis.writer_model=tiny-writer"]


def asked(*texts):
    return [
        {"id": f"q{n}", "question": text, "golden_answers": ["Jane Austen"], "supporting_ids": ["emma"],
         "hops": 1, "response": "Jane Austen wrote Emma. ### Jane Austen"}
        for n, text in enumerate(texts)
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path, server):
    """Runs the program on questions; returns the rows, and the counts."""

    def invoke(*texts, out="rows", more=()):
        questions = write_jsonl_file(tmp_path / "questions.jsonl", asked(*texts))
        words = [*TINY, f"synthesis.writer_url={server.base}", "--questions", str(questions),
                 "--out", str(tmp_path / out), *more]  # fmt: skip
        synthesize.main(words)
        rows = [json.loads(line) for path in (tmp_path / out).glob("rows.jsonl") for line in path.open()]
        return rows, json.loads((tmp_path / out / "rows.json").read_text())["counts"]

    return invoke


@pytest.mark.slow
def test_paraphrases_keep_what_is_known_of_a_question(run, server, tmp_path, monkeypatch):
    monkeypatch.setenv("DLM_RAG_WRITER_KEY", "secret")
    texts = ("Who wrote Emma?", "Who wrote Dune in 1965?", "Who wrote Emma?")
    rows, counts = run(*texts)
    assert [row["id"] for row in rows] == ["q0#paraphrase", "q1#paraphrase"], "equal ones are one"
    assert rows[0] == {
        "id": "q0#paraphrase", "question": "Please say: Who wrote Emma?",
        "golden_answers": ["Jane Austen"],
        "supporting_ids": ["emma"], "hops": 1, "response": "Jane Austen wrote Emma. ### Jane Austen",
        "source_ids": ["q0"], "template": "paraphrase", "model": "tiny-writer",
        "filters": ["finished", "other_words", "names_kept", "answer_not_in_question"],
        "settings": rows[0]["settings"],
    }  # fmt: skip
    assert counts["writer: requests"] == counts["sources"] == 3
    assert counts["left out: equal to an earlier row"] == 1
    assert counts["writer: response tokens"] == 2 * 5 + 7
    sent = server.requests
    assert {line["key"] for line in sent} == {"Bearer secret"} and len({line["seed"] for line in sent}) == 3
    assert {(line["model"], line["temperature"], line["max_tokens"]) for line in sent} == {
        ("tiny-writer", 0.7, 1024)
    }
    assert read_questions(tmp_path / "rows")[1].question == "Please say: Who wrote Dune in 1965?"
    run(*texts)
    assert len(server.requests) == 3, "nothing is asked again"


@pytest.mark.slow
def test_what_fails_in_passing_is_tried_again_and_what_is_refused_is_not(run, server):
    rows, counts = run(
        "busy: who?", "broken: who?", "forbidden: who?", "endless: who?", "same: who?", "other Emma?"
    )
    assert sorted(row["source_ids"][0] for row in rows) == ["q0", "q1"]
    assert {key: n for key, n in counts.items() if "left out" in key} == {
        "left out: refused by the writer": 1, "left out: not finished": 1, "left out: not other_words": 1,
        "left out: not names_kept": 1,
    }  # fmt: skip
    tries = Counter(line["text"].rpartition("Question: ")[2].split(":")[0] for line in server.requests)
    assert tries == {"busy": 3, "broken": 2, "forbidden": 1, "endless": 1, "same": 1, "other Emma?": 1}
    assert counts["writer: requests"] == 8


@pytest.mark.slow
def test_what_has_no_answer_is_asked_again_by_the_same_command(run, server, capsys, monkeypatch):
    """One that takes too long does not cost the others theirs."""
    monkeypatch.setattr(chat_client, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(chat_client, "ATTEMPTS", 1)
    with pytest.raises(SystemExit) as stop:
        run("Who wrote Emma?", "slow: who?", "Who wrote Dune?")
    assert stop.value.code == 1 and "1 failed; the same command asks again" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("Who wrote Emma?", "slow: who?", "Who wrote Dune?")
    tries = Counter(line["text"].rpartition("Question: ")[2] for line in server.requests)
    assert tries == {"Who wrote Emma?": 1, "slow: who?": 2, "Who wrote Dune?": 1}


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("By whom was Emma of 1815 written?", None),
        ("Question: By whom was Emma of 1815 written?", None),
        ("who wrote emma of 1815", "other_words"),
        ("By whom was Persuasion of 1815 written?", "names_kept"),
        ("By whom was Emma of 1816 written?", "names_kept"),
        ("Was Emma of 1815 written by Jane Austen?", "answer_not_in_question"),
    ],
)
def test_what_is_checked_of_a_paraphrase(text, fails):
    source = Question("q", "Who wrote Emma of 1815?", ("Jane Austen",))
    found = check_paraphrase(source, Completion(text, "stop", 1, 1))
    assert [name for name, holds in found.items() if not holds] == ([fails] if fails else [])


@pytest.mark.parametrize(
    ("text", "reason"), [("By whom was Emma of 1815 written?", "length"), ("", "stop")]
)
def test_a_paraphrase_that_was_cut_is_left_out(text, reason):
    source = Question("q", "Who wrote Emma of 1815?", ("Jane Austen",))
    assert not check_paraphrase(source, Completion(text, reason, 1, 1))["finished"]
