"""The command lines: bad input is one sentence and exit code 2, before any weight is read."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.commands import call, model  # noqa: F401 - fixtures
from tests.support.passages import write_jsonl_file
from tests.support.paths import ROOT
from tests.support.processes import count_lines, wait_until
from tests.support.traces import rebuild_evidence, rebuild_tokenizer

sys.path.insert(0, str(ROOT))
from dlm_rag import __version__
from dlm_rag.__main__ import PROGRAMS, main
from dlm_rag.commands import evaluate, prepare_decoder, sample
from dlm_rag.commands.answer_job import LocalEngines
from dlm_rag.commands.arguments import READER, parse_command_line
from dlm_rag.commands.prepare_decoder import SHIPPED_FOLDER, open_search_source
from dlm_rag.config import CONFIG_FOLDER, Config, RetrievalConfig, load_config
from dlm_rag.decode.trace_file import AnswersFile, read_trace, read_trace_header
from dlm_rag.engine.engine import Decoder
from dlm_rag.errors import ConfigError
from dlm_rag.page.render import build_page_record, read_trace_runs

QUESTIONS = [{"id": f"n{n}", "question": f"Who wrote book number {n}?"} for n in range(6)]


@pytest.fixture
def questions_file(tmp_path):
    return write_jsonl_file(tmp_path / "questions.jsonl", QUESTIONS)


def write_scored(tmp_path, **more):
    """A file of one question that can be scored."""
    row = {"id": "1", "question": "Who wrote Emma?", "golden_answers": ["Jane Austen"]} | more
    return write_jsonl_file(tmp_path / "q.jsonl", [row])


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_piped_answer_is_one_json_line(call):
    code, out, err = call("Who wrote Emma?")
    assert code == 0
    (record,) = records(out)
    assert record["id"] == "q1" and record["question"] == "Who wrote Emma?" and record["forwards"] > 0
    assert "emma" in record["evidence"]
    figures = err.splitlines()[-1]
    for part in ("answers/s", "forwards/answer", "tokens/forward", "denoise", "cpu float32 sdpa", "joint"):
        assert part in figures


MADE_UP = "the shipped model knows only its invented world"


def test_the_shipped_model_says_what_it_does_not_know(call, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "decode_to_screen", lambda *_: 0)
    known = json.loads((SHIPPED_FOLDER / "world" / "questions.jsonl").open().readline())
    own = call(known["question"], defaults=False)
    assert own[0] == 0 and MADE_UP not in own[2]
    foreign = call("Who wrote Emma?", defaults=False)
    assert foreign[0] == 0 and MADE_UP in foreign[2] and "--model" in foreign[2]
    config = tmp_path / "own.yaml"
    config.write_text("decode: {commit_threshold: 0.8}")
    mine = call(known["question"], "--corpus", corpus_file, "--config", config, defaults=False)
    assert mine[0] == 0 and MADE_UP in mine[2]
    assert MADE_UP not in call("Who wrote Emma?")[2]


SHIPPED = sorted(CONFIG_FOLDER.glob("*.yaml"))
FAMILIES = [path.name for path in SHIPPED if load_config(str(path)).train == Config().train]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_of_a_family_names_its_checkpoint(call, corpus_file, name):
    """Nothing else answers in its place; without a network the hub id that is missing is said."""
    path = load_config(name).model.path
    code, _, err = call("Who wrote Emma?", "--corpus", corpus_file, "--config", name, defaults=False)
    assert code == 2 and f"'{path}'" in err, err


def test_evaluation_with_nothing_named_is_the_shipped_model_for_a_minute(call, tmp_path, monkeypatch):
    planned: list[Config] = []
    monkeypatch.setattr(evaluate, "run_evaluation", lambda out, wanted, _: planned.append(wanted.config))
    assert call(program=evaluate, defaults=False)[0] == 0
    assert call("decode.commit_threshold=0.8", program=evaluate, defaults=False)[0] == 0
    assert [(each.out, each.limit) for each in planned] == [("runs/evaluation", n) for n in (200, None)]


def test_a_corpus_of_ones_own_is_read_by_the_shipped_reader(call, corpus_file, tmp_path, monkeypatch):
    """With what is named on top; not where a model or a config is named."""
    asked: list[Config] = []
    monkeypatch.setattr(sample, "decode_to_screen", lambda config, *_: asked.append(config) or 0)
    own = tmp_path / "own.yaml"
    own.write_text("decode: {batch_size: 8}\n")  # the default

    call("What is Emma?", "--corpus", corpus_file, defaults=False)
    assert (asked[-1].model.path, asked[-1].decode) == (READER, Config().decode)
    call("What?", "--corpus", corpus_file, "retrieval.top_k=7", "decode.seed=5", defaults=False)
    assert (asked[-1].model.path, asked[-1].decode.seed, asked[-1].retrieval.top_k) == (READER, 5, 7)

    world = SHIPPED_FOLDER / "world" / ".." / "world" / "corpus.jsonl"
    for words in (
        ["--corpus", world],
        ["--corpus", corpus_file, "--config", own],
        ["--corpus", corpus_file, "model.path=null"],
    ):
        call("What?", *words, defaults=False)
        assert asked[-1].model.path == str(SHIPPED_FOLDER / "model")
    call("What?", "--corpus", corpus_file, "--model", "elsewhere", defaults=False)
    assert asked[-1].model.path == "elsewhere"


def read_evaluation(*words):
    reads = evaluate.EVALUATE_READS
    return parse_command_line("", words, reads, options=evaluate.EVALUATE_OPTIONS)


def test_evaluate_compares_settings_of_the_shipped_reader(corpus_file):
    compared = "committed,interleaved+decode.commit_threshold=0.8"
    read = read_evaluation("--corpus", str(corpus_file), "--compare", compared)
    first, second = evaluate.plan_from_command_line(read).settings.values()
    assert first.model.path == second.model.path == READER
    assert second.decode.commit_threshold == 0.8
    read = read_evaluation("--corpus", str(corpus_file), "--sweep", "model.path=one,two")
    swept = evaluate.plan_from_command_line(read).settings.values()
    assert [each.model.path for each in swept] == ["one", "two"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--compare committed decode.query_threshold=0.5", "decode.query_threshold is set to one value"),
        ("--compare interleaved decode.query_policy=committed", "decode.query_policy is set to one value"),
        ("--compare none retrieval.method=dense", "retrieval.method is set to one value, and by every"),
        ("--compare oracle decode.query_policy=proxy", "decode.query_policy is set to one value"),
        ("--sweep decode.seed=1,2 decode.seed=1", "decode.seed is set to one value"),
        ("--compare none,static retrieval.top_k=3 decode.query_policy=question", ""),
        ("--corpus wiki18 --compare static", ""),  # the name of a file
        ("--model openai://h/v1/m workers=2", r"workers has no .* behind a server \(static\)"),
        ("--model openai://h/v1/m record_provisional=true", "record_provisional has no effect on"),
        ("--model openai://h/v1/m --compare ircot,search_r1 prompt=sardi", r"prompt .*\(ircot, search_r1"),
        ("--model openai://h/v1/m --compare ircot decode.max_new_tokens=9", "decode.max_new_tokens has no"),
        ("--model openai://h/v1/m --compare ircot,oracle prompt=sardi decode.max_new_tokens=9", ""),
    ],
)
def test_settings_that_change_nothing_are_refused(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dlm_rag.data.hub_datasets.find_dataset", lambda *_: tmp_path / "wiki18.jsonl")
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        evaluate.plan_from_command_line(read_evaluation(*words.split()))


def test_control_c_on_the_screen_says_how_to_go_on_and_leaves_the_page_so_far(call, tmp_path, monkeypatch):
    stream = Decoder.stream

    def interrupted(*given):
        yield next(iter(stream(*given)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "stream", interrupted)
    page = tmp_path / "page.html"
    code, _, err = call("Who wrote Emma?", "Who wrote Dune?", "--html", page)
    assert code == 130 and f"the page is in {page}" in err and "1 of 2 answered; with --out FILE" in err
    assert "Who wrote Emma?" in page.read_text() and "Who wrote Dune?" not in page.read_text()


def test_a_run_that_goes_on_with_a_page_records_guesses_from_there(call, questions_file, tmp_path):
    """The answers before have none, and are neither asked again nor refused."""
    trace = tmp_path / "t.jsonl"
    command = ["--questions", questions_file, "--out", tmp_path / "a.jsonl", "--trace", trace]
    assert call(*command, "limit=1")[0] == 0
    begun = trace.read_text()
    assert '"guesses"' not in begun
    code, _, err = call(*command, "--html", tmp_path / "page.html")
    assert code == 0 and "1 of 6 questions are answered already" in err
    assert trace.read_text().startswith(begun)
    with_them = [any(map(len, rollout.provisional_tokens())) for rollout in read_trace(trace)]
    assert with_them == [False, *[True] * 5]
    sides = [question["sides"][0] for question in build_page_record(read_trace_runs([trace]))["questions"]]
    assert [side["ghosts"] for side in sides] == with_them


def test_a_question_that_fails_is_recorded_and_the_others_are_answered(call, tmp_path):
    out = str(tmp_path / "answers.jsonl")
    words = ("Tacoma?", "why " * 25_000, "--out", out)
    code, _, err = call(*words)
    answered, failed = sorted(records(Path(out).read_text()), key=lambda record: record["id"])
    assert code == 1 and "1 failed" in err
    assert not answered.get("error") and answered["forwards"]
    assert failed["id"] == "q2" and "tokens too long" in failed["error"] and failed["response"] == ""
    code, _, err = call(*words)
    assert code == 1 and "1 of 2 questions are answered already" in err, "what failed is asked again"
    assert len(records(Path(out).read_text())) == 2


def test_one_command_for_all_programs(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["/anywhere/dlm-rag", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        return stop.value.code, out.out, out.err

    assert call()[:2] == call("--help")[:2]
    assert all(f"dlm-rag {name} " in call()[1] for name in PROGRAMS)
    assert call("--version") == (0, f"{__version__}\n", "")
    code, out, err = call("smaple", "--help")
    assert (code, out) == (2, "") and "nearest: 'sample'" in err
    code, _, err = call("train", "--confg", "tiny.yaml")
    assert code == 2 and "`dlm-rag train --help` lists the flags" in err
    code, out, _ = call("sample", "--config", "sardi.yaml", "--print-config")
    assert code == 0 and "early_stopping: false" in out


def test_the_same_command_again_does_only_what_is_left(call, tmp_path, questions_file, model):
    out, trace = tmp_path / "answers.jsonl", tmp_path / "trace.jsonl"
    words = ("--questions", questions_file, "--out", out, "--trace", trace)
    stamped = Path(f"{out}.run.json")
    assert call(*words)[0] == 0
    whole, whole_trace = out.read_text(), trace.read_text()
    assert [record["id"] for record in records(whole)] == [q["id"] for q in QUESTIONS]
    stamp = json.loads(stamped.read_text())
    assert stamp["attention"] == "sdpa" and stamp["seed"] == 0 and stamp["versions"]["torch"]
    assert stamp["config"]["decode"]["max_new_tokens"] == 8
    depends = stamp["answers_depend_on"]
    assert (depends["evidence_layout"], depends["dtype"]) == ("joint", "float32")
    assert len(depends["corpus"]) == 64

    lines = whole.splitlines(keepends=True)
    fifth = whole_trace.index('{"id": "n4"')
    out.write_text("".join(lines[:3]) + lines[3][:40])  # killed while writing the fourth answer,
    trace.write_text(whole_trace[: fifth + 9])  # whose trace was there already
    code, _, err = call(*words)
    assert code == 0 and "3 of 6 questions are answered already" in err

    def timeless(text):
        return [{k: v for k, v in each.items() if k not in ("seconds", "steps")} for each in records(text)]

    assert out.read_text().splitlines(keepends=True)[:3] == lines[:3], "what was there is untouched"
    assert timeless(out.read_text()) == timeless(whole)
    assert timeless(trace.read_text()) == timeless(whole_trace)
    rollouts, header = list(read_trace(trace)), read_trace_header(trace)
    assert [rollout.id for rollout in rollouts] == [q["id"] for q in QUESTIONS]
    assert header.settings["max_new_tokens"] == 8 and header.model and header.corpus
    for fitted in rebuild_evidence(rollouts[5], header, rebuild_tokenizer(header, model)):
        assert bytes(fitted.prompt.ids).startswith(b"Use ONLY the provided facts")

    before = stamped.read_text()
    code, _, err = call(*words)
    assert code == 0 and "6 of 6 questions are answered already" in err
    assert err.splitlines()[-1] == f"the answers are in {out}, the traces in {trace}"
    assert stamped.read_text() == before, "the stamp is of the run that began the file"


def test_answers_of_other_settings_weights_and_passages_are_not_mixed(
    call, tmp_path, questions_file, model, corpus_file
):
    out, own, same = tmp_path / "answers.jsonl", tmp_path / "own", tmp_path / "same.jsonl"
    shutil.copytree(model, own)
    words = ("--questions", questions_file, "--out", out, "--model", own)
    assert call(*words)[0] == 0
    before = out.read_bytes()

    def is_refused(says, *more):
        code, _, err = call(*words, *more)
        assert code == 2 and says in err and out.read_bytes() == before

    is_refused("answers with decode.commit_threshold=0.9, this run has 0.5", "decode.commit_threshold=0.5")
    assert call(*words, "decode.batch_size=2")[0] == 0, "the batch size changes no answer"
    same.write_bytes(corpus_file.read_bytes())
    assert call(*words, "--corpus", same)[0] == 0, "the same passages in another place"
    other = write_jsonl_file(tmp_path / "c.jsonl", [{"id": "1", "text": "x"}])
    is_refused("holds answers with corpus=", "--corpus", other)
    weights = own / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 1]) + whole[-4999:])
    is_refused("holds answers with model=")  # one bit, far from the beginning
    weights.write_bytes(whole)
    assert call(*words)[0] == 0
    (own / "special_tokens_map.json").write_text("{}")  # a file that only the tokenizer reads
    is_refused("holds answers with model=")
    asked = write_jsonl_file(tmp_path / "other.jsonl", [{"id": "n0", "question": "Another question?"}])
    code, _, err = call("--questions", asked, "--out", out)
    assert code == 2 and "answer to another question with the id 'n0'" in err


def test_a_corpus_that_changes_while_it_is_in_use_ends_the_run_and_keeps_the_answers(
    call, tmp_path, corpus_file, monkeypatch
):
    append, out = AnswersFile.append, tmp_path / "answers.jsonl"

    def append_and_cut(file, rollout):
        append(file, rollout)
        corpus_file.write_bytes(corpus_file.read_bytes()[:50])

    monkeypatch.setattr(AnswersFile, "append", append_and_cut)
    asked = [{"id": f"n{n}", "question": f"Who wrote Emma, volume {n}?"} for n in range(6)]
    path = write_jsonl_file(tmp_path / "questions.jsonl", asked)
    words = ("--questions", path, "--out", out, "decode.batch_size=1")
    whole = corpus_file.read_bytes()
    code, _, err = call(*words)
    assert code == 2 and f"{corpus_file} has changed while it was in use" in err and "Traceback" not in err
    assert [record["id"] for record in records(out.read_text())] == ["n0"]
    corpus_file.write_bytes(whole)
    monkeypatch.undo()
    code, _, err = call(*words)
    assert code == 0 and "1 of 6 questions are answered already" in err


def test_typed_questions_are_asked_beside_those_chosen_and_may_hold_an_equals_sign(call, questions_file):
    code, out, _ = call("E=mc^2 was written by whom?", "--questions", questions_file, "--limit", 2)
    *chosen, typed = sorted(records(out), key=lambda record: record["id"])
    assert code == 0 and {record["id"] for record in chosen} < {question["id"] for question in QUESTIONS}
    assert len(chosen) == 2 and typed["id"] == "q1" and typed["question"].startswith("E=mc^2")


@pytest.mark.slow
def test_control_c_in_the_middle_loses_and_repeats_nothing(tmp_path, model, corpus_file):
    """A real process is interrupted after its first answers; the same command then finishes."""
    questions = [{"id": f"n{n}", "question": f"Who wrote book number {n}?"} for n in range(40)]
    path, out = write_jsonl_file(tmp_path / "q.jsonl", questions), tmp_path / "answers.jsonl"
    files = {"--questions": path, "--out": out, "--model": model, "--corpus": corpus_file}
    command = [sys.executable, "sample.py", *(str(word) for pair in files.items() for word in pair)]
    command += ["decode.batch_size=1", "decode.max_new_tokens=12", "decode.early_stopping=false"]
    command += ["decode.commit_rule=top_k"]
    # Shells start background jobs with SIGINT ignored, and children inherit that.
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_until(lambda: count_lines(out) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "the same command goes on" in err
    first = out.read_text()
    done = first.count("\n")
    assert 2 <= done < 40

    again = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert again.returncode == 0 and f"{done} of 40 questions are answered already" in again.stderr
    assert out.read_text().startswith(first)
    assert [record["id"] for record in records(out.read_text())] == [q["id"] for q in questions]


def test_evaluate_scores_what_it_decoded(call, tmp_path):
    rows = [
        {"id": "1", "question": "Who wrote Emma?", "golden_answers": ["Jane Austen"],
         "supporting_ids": ["emma"], "hops": 1},
        {"id": "2", "question": "Where was Frank Herbert born?", "golden_answers": ["Tacoma"],
         "supporting_ids": ["dune", "steventon"], "hops": 2},
    ]  # fmt: skip
    path, out = write_jsonl_file(tmp_path / "q.jsonl", rows), tmp_path / "runs"
    words = ("--questions", path, "--out", out, "retrieval.top_k=1", "decode.query_policy=question")
    code, screen, err = call(*words, program=evaluate)
    assert code == 0 and "2 hops" in screen
    record = json.loads((out / "scores.json").read_text())
    (setting,) = record["settings"].values()
    said = re.search(r"([\d.]+) tokens/forward", err)[1]
    assert said == f"{setting['groups']['all']['tokens_per_forward']['mean']:.2f}", "one number in both"
    assert record["f1_rule"] == "squad" and "F1 (squad) %" in (out / "scores.md").read_text()
    groups = setting["groups"]
    assert groups["1 hop"]["recall_first"]["mean"] == 1.0
    assert groups["2 hops"]["recall_last"]["mean"] == 0.0 and groups["all"]["recall_last"]["mean"] == 0.5
    assert setting["stamp"]["answers_depend_on"]["retrieval.top_k"] == 1


def test_evaluate_compares_settings_on_the_same_questions(call, tmp_path):
    """None finds nothing, the oracle what it is told; each setting can be gone on with by itself."""
    path, runs = write_scored(tmp_path, supporting_ids=["dune", "emma"]), tmp_path / "runs"
    words = ("--questions", path, "--out", runs, "--compare", "none,oracle,static+retrieval.top_k=1")
    code, _, err = call(*words, program=evaluate)
    assert code == 0 and "static+retrieval.top_k=1" in err
    record = json.loads((runs / "scores.json").read_text())
    recall = [s["groups"]["all"]["recall_last"]["mean"] for s in record["settings"].values()]
    assert recall == [0.0, 1.0, 0.5]
    assert list(record["first_minus"]) == ["oracle", "static+retrieval.top_k=1"]
    assert "Exact match" in (runs / "scores.md").read_text()
    evidence = json.loads((runs / "oracle" / "answers.jsonl").read_text())["evidence"]
    assert evidence[:2] == ["dune", "emma"], "support first, then what the question finds"
    code, _, err = call(*words, program=evaluate)
    assert code == 0 and err.count("1 of 1 questions are answered already") == 3
    write_scored(tmp_path, supporting_ids=["emma"])  # which is now said otherwise
    code, _, err = call(*words, program=evaluate)
    assert code == 0 and err.count("1 of 1 questions are answered already") == 2
    (line,) = (runs / "oracle" / "answers.jsonl").read_text().splitlines()
    assert json.loads(line)["supports"] == ["emma"] == json.loads(line)["evidence"][:1]


def test_evaluate_says_which_support_is_missing(call, tmp_path):
    path = write_scored(tmp_path, supporting_ids=["emma", "nowhere"])
    words = ("--questions", path, "--out", tmp_path / "runs", "--compare", "none,static")
    code, _, err = call(*words, program=evaluate)
    assert code == 0 and "1 of 2 supporting passages are not in the corpus" in err


def test_an_oracle_of_a_file_of_settings_is_refused_for_a_service():
    config = RetrievalConfig(url="http://127.0.0.1/retrieve", oracle=True)
    find = open_search_source(config, lambda make, *key: "service")
    with pytest.raises(ConfigError, match="needs --corpus FILE, not retrieval.url"):
        find([], "question")


def test_a_folder_keeps_the_scores_of_one_choice_of_questions(call, tmp_path):
    rows = [{"id": str(n), "question": f"Who {n}?", "golden_answers": ["x"]} for n in range(4)]
    words = ("--questions", write_jsonl_file(tmp_path / "q.jsonl", rows), "--out", tmp_path / "runs")
    assert call(*words, "--limit", 3, program=evaluate)[0] == 0
    record = json.loads((tmp_path / "runs" / "scores.json").read_text())
    assert record["questions"]["all"] == 3 and record["chosen"] == {"limit": 3}
    (setting,) = record["settings"].values()
    assert setting["stamp"]["config"]["limit"] == 3
    for more in ((), ("--quick",), ("--limit", 2)):
        code, _, err = call(*words, *more, program=evaluate)
        assert code == 2 and "holds the scores of questions chosen with limit=3" in err
    assert call(*words, "--limit", 3, program=evaluate)[0] == 0


def test_what_a_service_does_not_read_is_said_and_is_not_the_run_s(monkeypatch, capsys):
    asked = []

    def stop(config, once):
        asked.append(config)
        raise ConfigError("asked")

    monkeypatch.setattr(prepare_decoder, "open_search_source", stop)
    words = ["model.path=dlm_rag/shipped/smollm2", "retrieval.url=http://127.0.0.1:1/retrieve"]
    with pytest.raises(ConfigError, match="asked"):
        prepare_decoder.prepare_decoder(load_config(None, words), [])
    (config,) = asked
    assert (config.bm25_stemmer, config.min_score_ratio, config.top_k) == ("none", 0.0, 3)
    assert "bm25_stemmer" in capsys.readouterr().err


def test_a_decoder_is_gone_before_the_next_is_loaded():
    engines, alive, seen = LocalEngines(), weakref.WeakSet(), []

    class Loaded:
        denoiser, stream, describe = None, lambda self: None, lambda self: None

    def load(kept):
        seen.append(len(alive))
        alive.add(made := Loaded())
        return made

    for _ in range(3):
        engines.open(SimpleNamespace(config=load_config(None, []), load=load, devices=[]))
    assert seen == [0, 0, 0]
