"""`evaluate` with a model behind a server: one table, resumed, whatever the server does."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from dlm_rag.baselines import run as baselines_run
from dlm_rag.baselines.run import PROBE_TOKENS
from dlm_rag.commands import evaluate, sample
from dlm_rag.decode.trace_file import read_trace
from dlm_rag.evaluation.compare import SERVED_PRESETS
from tests.support.commands import call, model  # noqa: F401 - `call` needs `model`
from tests.support.evaluations import make_evaluation_folder
from tests.support.paths import ROOT
from tests.support.processes import count_lines, wait_until

WORDS = ("--corpus", "corpus.jsonl", "--questions", "q.jsonl", "--out", "run")
EVERY_POLICY = [
    ["inside <think>", ["<search>Emma</search>", "<answer>x</answer>"]],
    ["", ["The answer is x."]],
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_evaluation_folder(tmp_path, 6)


@pytest.fixture
def run(call, folder, server):
    """Evaluates the scripted model: the exit status, standard error, and scores.json if there is one."""

    def invoke(*words, model=server.url, out="run"):
        given = ("--model", model, *WORDS[:5], out)
        code, shown, err = call(*given, *words, program=evaluate, defaults=False)
        path = folder / out / "scores.json"
        return code, shown + err, json.loads(path.read_text()) if path.exists() else {}

    return invoke


def read_answers(path):
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_all_policies_are_settings_of_one_table(run, server, folder, monkeypatch):
    monkeypatch.setenv("DLM_RAG_MODEL_KEY", "secret")
    server.say(*EVERY_POLICY)
    code, shown, record = run("--compare", "all")
    assert {request["key"] for request in server.requests} == {"Bearer secret"}
    assert code == 0, shown
    assert [*record["settings"]] == [*SERVED_PRESETS] and "static" in record["first_minus"]
    spent = 0
    for name, setting in record["settings"].items():
        answers, metrics = read_answers(folder / "run" / name / "answers.jsonl"), setting["groups"]["all"]
        assert metrics["exact_match"]["mean"] == 1, name
        usage = [line["usage"] for line in answers.values()]
        for key, metric in (("completion_tokens", "forwards"), ("prompt_tokens", "prompt_tokens")):
            assert sum(each[key] for each in usage) / 6 == pytest.approx(metrics[metric]["mean"])
        assert all(line["forwards"] == line["tokens"] == u["completion_tokens"]
                   for line, u in zip(answers.values(), usage, strict=True))  # fmt: skip
        spent += sum(each["requests"] for each in usage)
        assert metrics["tokens_per_forward"]["mean"] == 1
        assert setting["stamp"]["answers_depend_on"]["model"] == "tiny behind a server"
    probes = sum(request["max_tokens"] == PROBE_TOKENS for request in server.requests)
    assert spent == len(server.requests) - probes and probes == len(SERVED_PRESETS)
    assert record["settings"]["oracle"]["groups"]["all"]["recall_last"]["mean"] == 1
    assert record["settings"]["no_retrieval"]["groups"]["all"]["searches"]["mean"] == 0
    assert "Asked of a server" in (folder / "run" / "scores.md").read_text()
    wall = record["settings"]["ircot"]["groups"]["all"]["seconds"]["mean"]
    assert wall * 6 == pytest.approx(
        sum(sum(r.seconds.values()) for r in read_trace(folder / "run" / "ircot" / "trace.jsonl"))
    )


@pytest.mark.slow
def test_a_finished_run_asks_nothing_again_even_where_the_server_is_gone(run, server):
    server.say(*EVERY_POLICY)
    _, _, before = run("--compare", "static,ircot")
    server.stop()
    code, shown, after = run("--compare", "static,ircot")
    assert code == 0 and "6 of 6" not in shown.replace("6 questions", "")
    assert after["settings"]["ircot"]["groups"] == before["settings"]["ircot"]["groups"]


@pytest.mark.slow
def test_what_failed_is_wrong_and_asked_again(run, server, folder):
    broken, refused = ({"raw": said} for said in ('{"choices": []}', '{"error": {"message": "no model"}}'))
    server.say(["probe|Who\\?", ["x"]], ["1801", [broken]], ["1802", [{"status": 400, "text": "too long"}]],
               ["1804", [refused]], ["1803", [{"text": "x", "usage": {}}]], ["", ["### x"]])  # fmt: skip
    code, shown, record = run()
    assert code == 0 and "4 failed, counted as wrong" in shown
    assert record["settings"]["static bm25"]["groups"]["all"]["exact_match"]["mean"] == pytest.approx(1 / 3)
    lines = sorted(read_answers(folder / "run" / "answers.jsonl").items())
    errors = [line.get("error", "") for _, line in lines]
    assert "another form" in errors[1] and "400 (too long)" in errors[2] and "count tokens" in errors[3]
    assert "200 (no model)" in errors[4]
    server.say(["", ["### x"]])
    code, shown, record = run()
    assert record["settings"]["static bm25"]["groups"]["all"]["exact_match"]["mean"] == 1
    asked = [r["text"] for r in server.requests if r["max_tokens"] > PROBE_TOKENS]
    assert len(asked) == 4 and all(any(f"in {1800 + n}?" in text for n in (1, 2, 3, 4)) for text in asked)


@pytest.mark.slow
def test_a_reply_that_was_cut_while_it_thought_is_one_without_text(run, server):
    """As vLLM's parsers of reasoning give it; the probe before the first question gets it, too."""
    choice = {"message": {"content": None, "reasoning_content": "Hm"}, "finish_reason": "length"}
    reply = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 16}}
    server.say(["", [{"raw": json.dumps(reply)}]])
    code, shown, record = run()
    assert code == 0 and "failed" not in shown
    found = record["settings"]["static bm25"]["groups"]["all"]
    assert (found["exact_match"]["mean"], found["cut_replies"]["mean"]) == (0, 1)


@pytest.mark.slow
def test_busy_servers_are_asked_again_and_replies_that_end_early_too(run, server, monkeypatch):
    monkeypatch.setattr(baselines_run, "ATTEMPTS", 4)
    busy = [{"status": 429, "text": "slow down"}, {"raw": ""}, {"raw": '{"choi'}, "### x"]
    server.say(["Who\\?", ["x"]], ["", busy])
    code, shown, record = run("remote.concurrency=1")
    assert code == 0, shown
    assert record["settings"]["static bm25"]["groups"]["all"]["exact_match"]["mean"] == 1
    assert record["settings"]["static bm25"]["groups"]["all"]["requests"]["mean"] == (4 + 5) / 6


@pytest.mark.slow
def test_a_server_that_goes_ends_the_run_which_goes_on_later(run, server, folder):
    server.say(["Who\\?", ["x"]], ["180[01]", ["### x"]], ["", [{"status": 503, "text": "going down"}]])
    code, shown, _ = run("remote.concurrency=1")
    assert code == 1 and "503 (going down): the same command resumes here" in shown
    server.say(["", ["### x"]])
    code, _, record = run("remote.concurrency=1")
    assert code == 0 and record["settings"]["static bm25"]["groups"]["all"]["exact_match"]["mean"] == 1
    years = {
        re.search(r"in (\d+)", r["text"])[1] for r in server.requests if r["max_tokens"] > PROBE_TOKENS
    }
    assert years == {"1802", "1803", "1804", "1805"}
    server.say(["Who\\?", ["x"]], ["", [{"status": 401, "text": "who are you"}]])
    code, shown, _ = run(out="other")
    assert code == 1 and "DLM_RAG_MODEL_KEY in the environment is not set" in shown


@pytest.mark.slow
def test_killed_it_goes_on_and_ends_in_the_same_answers(folder, server):
    server.say(*EVERY_POLICY[:1], ["", ["The answer is x."]])
    command = [sys.executable, "-m", "dlm_rag", "evaluate", "--model", server.url, *WORDS,
               "--compare", "static,ircot", "remote.concurrency=1"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    wait_until(lambda: count_lines(folder / "run" / "ircot" / "answers.jsonl") >= 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = read_answers(folder / "run" / "ircot" / "answers.jsonl")
    assert subprocess.run(command, cwd=folder, env=environment, check=False).returncode == 0
    answers = read_answers(folder / "run" / "ircot" / "answers.jsonl")
    assert {name: answers[name] for name in kept} == kept and len(answers) == 6
    for name in ("static", "ircot"):
        lines = (folder / "run" / name / "answers.jsonl").read_text().splitlines()
        assert len(lines) == 6 and len([*read_trace(folder / "run" / name / "trace.jsonl")]) == 6


@pytest.mark.slow
def test_both_kinds_of_models_stand_in_one_table(run, server):
    server.say(["", ["### x"]])
    compared = f"interleaved,static,static+model.path={server.url}"
    code, shown, record = run("--compare", compared, "decode.max_new_tokens=8", model="model")
    assert code == 0, shown
    ours, _, theirs = (record["settings"][name]["groups"]["all"] for name in compared.split(","))
    assert ours["requests"] is None and theirs["requests"]["mean"] == 1
    assert record["first_minus"][compared.split(",")[2]]["all"]["exact_match"]["mean"] == -1


@pytest.mark.slow
def test_a_policy_of_ones_own(run, server, folder):
    code = "def twice(run):\n    run.search(run.question)\n    run.search('Emma')\n"
    (folder / "mine.py").write_text(code + "    run.respond(run.chat('Say it').text)\n")
    server.say(["", ["### x"]])
    code, shown, record = run("remote.policy=mine:twice")
    assert code == 0, shown
    assert record["settings"]["mine:twice bm25"]["groups"]["all"]["searches"]["mean"] == 2


NO_COMPLETIONS = [["Think step", ["x"]], ["", [{"status": 404, "text": "no"}]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rules", "says"),
    [
        ("--compare interleaved", [], "no_retrieval, static, ircot"),
        ("--compare flare", [], "flare"),
        ("--compare static", [["", [{"text": "x", "usage": None}]]], "does not count tokens"),
        ("--compare static,ircot", NO_COMPLETIONS, "ircot needs /completions of plain text"),
        ("decode.commit_threshold=0.8", [], "decode.commit_threshold has no effect on a model behind a"),
        ("remote.policy=ircot retrieval.oracle=true", [], "needs remote.policy=static"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(run, server, folder, words, rules, says):
    server.say(["", ["x"]]) if not rules else server.say(*rules)
    code, shown, record = run(*words.split())
    assert code == 2 and says in shown.replace("\n", " "), shown
    assert not record and not [*folder.glob("run/**/answers.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("openai://127.0.0.1:1/v1/tiny", "does not list its models"),
        ("openais://user@host/v1/tiny", "is not openai://HOST:PORT/v1/NAME"),
        ("{url}-7b", "has no model 'tiny-7b', but tiny (nearest: 'tiny')"),
    ],
)
def test_a_model_that_is_not_there(run, server, url, says):
    code, shown, _ = run(model=url.format(url=server.url))
    assert code == 2 and says in shown, shown


@pytest.mark.slow
def test_programs_that_decode_here_refuse_it(call, server, folder):
    code, _, err = call("Who wrote Emma?", "--model", server.url, program=sample)
    assert code == 2 and "is for evaluate" in err
    shutil.rmtree(folder / "model")
