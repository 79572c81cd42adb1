"""The judge: its prompt, how strictly it is read, what is kept, and its accuracy beside exact match."""

import json

import pytest

from dlm_rag.commands import evaluate
from dlm_rag.evaluation.judge import JUDGED_FILE, format_judge_prompt, parse_verdict
from dlm_rag.evaluation.metrics import estimate_share
from dlm_rag.questions import Question
from tests.support.chat_server import server  # noqa: F401 - a fixture
from tests.support.commands import call, model  # noqa: F401 - `call` needs `model`
from tests.support.evaluations import make_evaluation_folder


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("True", True), ("False", False), (" true.", True), ("**False**", False), ('"True"', True),
        ("True, it is the same town.", True), ("False. It is not the town.", False),
        ("True or False? True", None), ("It is True", None), ("Truely", None), ("", None), ("yes", None),
        ("The prediction is correct", None), ("False, as True would need the year", None),
    ],
)  # fmt: skip
def test_how_a_reply_is_read(reply, verdict):
    assert parse_verdict(reply) is verdict


def test_what_the_judge_is_asked():
    one = format_judge_prompt(Question("q", "Who {x}?", ("Austen",)), "{answer}")
    assert one.endswith("\n\nQuestion: Who {x}?\nGolden Answer: Austen\nPredicted Answer: {answer}")
    several = format_judge_prompt(Question("q", "Who?", ("Austen", "J. Austen")), "x")
    assert "multiple options" in several and "multiple options" not in one
    assert "Golden Answer: Austen; J. Austen\n" in several


@pytest.fixture
def run(call, tmp_path, monkeypatch, server):
    """Evaluates a scripted model under its own judge: exit status, what is said, scores.json."""
    monkeypatch.chdir(tmp_path)
    make_evaluation_folder(tmp_path, 6)

    def invoke(*words):
        given = (
            "--model",
            server.url,
            "--corpus",
            "corpus.jsonl",
            "--questions",
            "q.jsonl",
            "--out",
            "run",
        )
        more = (f"judge={server.url}", "remote.max_retries=1", "remote.concurrency=1")
        code, out, err = call(*given, *more, *words, program=evaluate, defaults=False)
        path = tmp_path / "run" / "scores.json"
        return code, out + err, json.loads(path.read_text()) if path.exists() else {}

    return invoke


ANSWERS = [["in 1800", ["I do not know."]], ["", ["### the letter x"]]]


def asked_judge(requests):
    return [request for request in requests if "Predicted Answer" in request["text"]]


def test_verdicts_are_scores_with_an_interval_and_are_asked_for_once(run, server, tmp_path):
    server.say(["Predicted(?s:.*)", ["True", "True", "False", "True", "False."]], *ANSWERS)
    code, shown, record = run()
    assert code == 0, shown
    found = record["settings"]["static bm25"]["groups"]["all"]
    expected = vars(estimate_share([0, 1, 1, 0, 1, 0]))
    assert found["judge_accuracy"] == expected and found["exact_match"]["mean"] == 0
    assert "Accuracy by the judge" in (tmp_path / "run" / "scores.md").read_text()
    assert record["judge"]["without_verdict"] == {"static bm25": 0}
    asked = asked_judge(server.requests)
    assert len(asked) == 5 and {r["temperature"] for r in asked} == {0}, "an empty answer is wrong"
    server.say(*ANSWERS)
    code, shown, again = run()
    assert again["settings"]["static bm25"]["groups"] == record["settings"]["static bm25"]["groups"]
    assert not asked_judge(server.requests)


def test_what_cannot_be_read_is_left_out_and_counted(run, server, tmp_path):
    refused = {"status": 400, "text": "no"}
    server.say(["Predicted", ["True", "Perhaps.", refused, {"raw": "{}"}, "False"]], *ANSWERS)
    code, shown, record = run()
    assert code == 0 and "3 without a verdict of the judge" in shown
    found = record["settings"]["static bm25"]["groups"]["all"]["judge_accuracy"]
    assert found["mean"] == pytest.approx(1 / 3), "two verdicts, and an empty answer"
    assert record["judge"]["without_verdict"] == {"static bm25": 3}
    assert "3 answers without a verdict" in (tmp_path / "run" / "scores.md").read_text()
    (tmp_path / "run" / JUDGED_FILE).open("a").write('{"id": "5", "ask')  # a kill cuts a line short
    server.say(["Predicted", ["True"]], *ANSWERS)
    code, _, record = run()
    assert len(asked_judge(server.requests)) == 3
    assert record["settings"]["static bm25"]["groups"]["all"]["judge_accuracy"]["mean"] == 4 / 6


def test_another_judge_judges_anew_and_the_first_is_not_forgotten(run, server):
    server.say(["Predicted", ["True"]], *ANSWERS)
    run()
    server.say(["Predicted", ["False"]], *ANSWERS, models=["tiny", "other"])
    code, _, record = run(f"judge={server.url.replace('/tiny', '/other')}")
    assert code == 0 and len(asked_judge(server.requests)) == 5
    assert record["settings"]["static bm25"]["groups"]["all"]["judge_accuracy"]["mean"] == 0
    assert {request["model"] for request in asked_judge(server.requests)} == {"other"}
    code, _, record = run()
    assert record["settings"]["static bm25"]["groups"]["all"]["judge_accuracy"]["mean"] == 5 / 6


def test_a_judge_that_goes_keeps_what_was_judged(run, server):
    gone = {"status": 503, "text": "going down"}
    server.say(["Respond with True.$", ["True"]], ["Predicted", ["True", "True", gone]], *ANSWERS)
    code, shown, record = run()
    assert code == 1 and "the same command resumes here" in shown and not record
    server.say(["Predicted", ["True"]], *ANSWERS)
    code, _, record = run()
    assert record["settings"]["static bm25"]["groups"]["all"]["judge_accuracy"]["mean"] == 5 / 6
    asked = {request["text"] for request in asked_judge(server.requests)}
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        ("openai://127.0.0.1:1/v1/tiny", "judge=openai://127.0.0.1:1/v1/tiny does not list its models"),
        ("http://127.0.0.1:1/v1/tiny", "judge must be openai://HOST:PORT/v1/NAME"),
        ("{url}-7b", "has no model 'tiny-7b', but tiny (nearest: 'tiny')"),
        ("{url}", "answers no chat: 404"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_anything_starts(
    call, tmp_path, monkeypatch, server, judge, says
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    make_evaluation_folder(tmp_path, 2)
    server.say(["Respond with True.$", [{"status": 404, "text": "no"}]], *ANSWERS)
    words = ("--model", "model", "--corpus", "corpus.jsonl", "--questions", "q.jsonl", "--out", "run")
    code, _, err = call(*words, f"judge={judge.format(url=server.url)}", program=evaluate, defaults=False)
    assert code == 2 and says in err, err
    assert not [*tmp_path.glob("run/answers.jsonl")]
