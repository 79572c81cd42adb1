"""The answers file: nothing that was answered is lost or asked twice, whatever is killed."""

import json
import multiprocessing
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.trace_file import AnswersFile, read_trace
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.questions import Question
from tests.support.results import CPU, make_stamp
from tests.support.traces import HEADER, make_rollout_with

GPU = {"device": "cuda", "name": "a device", "attention": "flash", "torch": "2.13.0", "cuda": "12.9"}
ASKED = [Question(f"q{n}", "Who?") for n in range(3)]


def answer(name, **changes):
    return make_rollout_with(id=name, response=f"x ### {name}", **changes)


def failed(name):
    return make_rollout_with(id=name, response="", steps=[], error="the search failed")


@pytest.fixture
def files(tmp_path):
    return tmp_path / "a.jsonl", tmp_path / "t.jsonl"


def run(files, rollouts=(), **stamped):
    """Begins, adds what is not there yet, closes; returns what was asked."""
    file = AnswersFile(*files)
    file.open_run(make_stamp(**stamped), HEADER)
    asked = [question.id for question in file.remaining(ASKED)]
    for rollout in rollouts:
        if rollout.id in asked:
            file.append(rollout)
    file.close()
    return asked


def ids(files):
    return [
        [json.loads(line)["id"] for line in files[0].read_text().splitlines()],
        [rollout.id for rollout in read_trace(files[1])],
    ]


def test_the_same_command_started_twice_deletes_and_repeats_nothing(files):
    """Both have read empty files; the second gets the lock when the first is done."""
    first, second = AnswersFile(*files), AnswersFile(*files)
    first.open_run(make_stamp(), HEADER)
    with pytest.raises(ConfigError, match="is being written by another process"):
        second.open_run(make_stamp(), HEADER)
    for name in ("q0", "q1"):
        first.append(answer(name))
    first.close()
    before = [path.read_bytes() for path in files]
    second.open_run(make_stamp(), HEADER)
    assert [path.read_bytes() for path in files] == before
    assert [question.id for question in second.remaining(ASKED)] == ["q2"]
    second.append(answer("q2"))
    second.close()
    assert ids(files) == [["q0", "q1", "q2"]] * 2


def test_what_another_process_has_begun_with_other_settings_is_left_alone(files):
    late = AnswersFile(*files)
    run(files, [answer("q0")], dtype="float32")
    with pytest.raises(ConfigError, match="holds answers with dtype=float32, this run has bfloat16"):
        late.open_run(make_stamp(dtype="bfloat16"), HEADER)
    assert ids(files) == [["q0"]] * 2
    assert run(files, dtype="float32") == ["q1", "q2"], "the lock was given back"


def test_a_kill_at_any_byte_loses_and_repeats_nothing(tmp_path, files):
    """Cut wherever a kill may cut, the files end as if nothing had happened."""
    rollouts = [answer(question.id) for question in ASKED]
    file = AnswersFile(*files)
    file.open_run(make_stamp(), HEADER)
    sizes = [(0, 0)]
    for rollout in rollouts:  # each adds to the trace, then to the answers
        file.append(rollout)
        sizes.append(tuple(path.stat().st_size for path in files))
    file.close()
    whole = [path.read_bytes() for path in files]
    states = []
    for (answers, traces), (more_answers, more_traces) in pairwise(sizes):
        states += [(answers, end) for end in (*range(traces, more_traces, 61), more_traces - 1)]
        states += [(end, more_traces) for end in (*range(answers, more_answers, 61), more_answers - 1)]
    killed = tmp_path / "killed.jsonl", tmp_path / "killed-trace.jsonl"
    stamped = json.dumps(make_stamp())
    for ends in states:
        for path, content, end in zip(killed, whole, ends, strict=True):
            path.write_bytes(content[:end])
        (tmp_path / "killed.jsonl.run.json").write_text(stamped)
        done = sum(answers - 1 <= ends[0] for answers, _ in sizes[1:])  # a line may lack its line break
        asked = run(killed, rollouts)
        assert asked == [question.id for question in ASKED[done:]], ends
        assert killed[0].read_bytes() == whole[0] and ids(killed)[1] == ids(files)[1], ends
        assert list(read_trace(killed[1])) == list(read_trace(files[1])), ends
    assert len(states) > 60


def test_answers_are_written_as_they_finish_each_after_its_trace(files, monkeypatch):
    file = AnswersFile(*files)
    file.open_run(make_stamp(), HEADER)
    file.append(answer("q0"))
    assert ids(files) == [["q0"]] * 2, "on disk at once"
    monkeypatch.setattr(Rollout, "to_dict", None)  # killed in between
    with pytest.raises(TypeError):
        file.append(answer("q1"))
    assert ids(files) == [["q0"], ["q0", "q1"]]
    file.close()
    monkeypatch.undo()
    assert run(files, [answer("q2"), answer("q1")]) == ["q1", "q2"]
    assert ids(files) == [["q0", "q2", "q1"]] * 2
    lines = files[1].read_text().splitlines()
    assert sum('"passage"' in line for line in lines) == 3 and '"trace": 2' in lines[0]


def test_what_failed_is_asked_again_and_what_was_answered_stays_byte_for_byte(files):
    run(files, [failed("q0"), answer("q1"), failed("q2")])
    kept = files[0].read_text().splitlines()[1]
    assert run(files, [answer("q0"), failed("q2")]) == ["q0", "q2"]
    assert ids(files) == [["q1", "q0", "q2"]] * 2
    assert files[0].read_text().splitlines()[0] == kept
    assert run(files, [answer("q2")]) == ["q2"]
    assert [rollout.error for rollout in read_trace(files[1])] == ["", "", ""]


def test_what_has_other_supports_now_is_asked_again_and_more_questions_change_nothing(files):
    first, *others = ASKED
    for supports, left in (
        ({"q0": ["a"]}, ["q0", "q1", "q2"]), ({"q0": ["a"], "q1": []}, ["q1", "q2"]), ({}, ["q1", "q2"]),
        ({"q0": ["b"]}, ["q0", "q1", "q2"]), ({"q0": ["b"]}, ["q1", "q2"]),
    ):  # fmt: skip
        file = AnswersFile(*files, supports)
        file.open_run(make_stamp(), HEADER)
        assert [question.id for question in file.remaining([first, *others])] == left
        if "q0" in left:
            file.append(answer("q0"))
        file.close()
        assert ids(files) == [["q0"]] * 2


def test_a_kill_while_lines_are_taken_out_leaves_a_whole_file(files, monkeypatch):
    """The new file takes the old one's place at once, the trace first."""
    run(files, [answer("q0"), failed("q1"), answer("q2")])
    monkeypatch.setattr(Path, "replace", None)
    before = [path.read_bytes() for path in files]
    with pytest.raises(TypeError):
        run(files)
    assert [path.read_bytes() for path in files] == before
    monkeypatch.undo()
    assert run(files, [answer("q1")]) == ["q1"]
    assert ids(files) == [["q0", "q2", "q1"]] * 2


def test_traces_belong_to_answers_by_id_in_any_order(files):
    run(files, [answer(question.id) for question in ASKED])
    header, *passages, first, second, third = files[1].read_text().splitlines(keepends=True)
    files[1].write_text("".join([header, *passages, third, first, second]))
    assert run(files) == []
    for lines in ([first, third], [first, second, third.replace("### q2", "### Q2")]):
        files[1].write_text("".join([header, *passages, *lines]))
        before = files[1].read_bytes()
        with pytest.raises(ConfigError, match="does not hold the traces of"):
            AnswersFile(*files)
        assert files[1].read_bytes() == before


def test_a_trace_of_another_run_is_left_alone(files, tmp_path):
    run(files, [answer("q0"), answer("q1")])
    before = files[1].read_bytes()
    with pytest.raises(ConfigError, match="does not hold the traces of"):
        AnswersFile(tmp_path / "typo.jsonl", files[1])
    other = tmp_path / "other.jsonl"
    run((other, tmp_path / "other-trace.jsonl"))  # begun, nothing answered
    with pytest.raises(ConfigError, match="does not hold the traces of"):
        run((other, files[1]))
    assert files[1].read_bytes() == before


def test_a_full_disk_is_one_sentence_and_what_was_answered_stays(files, monkeypatch):
    """Wherever it is noticed: in the trace, in the answers, half-way through a line."""
    import resource

    file = AnswersFile(*files)
    file.open_run(make_stamp(), HEADER)
    file.append(answer("q0"))
    before = [path.read_bytes() for path in files]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (len(before[1]), len(before[1]) + 40):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(
                RunError, match=r"a\.jsonl cannot be written any more \(File too large\); .* kept"
            ):
                file.append(answer("q1"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.close()
    assert files[0].read_bytes() == before[0] and files[1].read_bytes().startswith(before[1])
    assert run(files, [answer("q1"), answer("q2")]) == ["q1", "q2"]
    assert ids(files) == [["q0", "q1", "q2"]] * 2


@pytest.mark.parametrize("how", ["cut", "moved", "removed before the first answer"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_is_not_ours_any_more_ends_the_run(files, tmp_path, which, how):
    """Nothing is added to what lies there, which stays; the same command then makes what is missing."""
    if how == "removed before the first answer":  # a model may load for minutes meanwhile
        run(files, [answer("q0")])
    file = AnswersFile(*files)
    file.open_run(make_stamp(), HEADER)
    if how != "removed before the first answer":
        file.append(answer("q0"))
    before = files[which].read_bytes()
    files[which].rename(tmp_path / "elsewhere")
    if how == "cut":
        files[which].write_bytes(before[:-1])
    with pytest.raises(RunError, match=f"{files[which]} was removed, replaced or cut short"):
        file.append(answer("q1"))
    assert (files[which].read_bytes() == before[:-1]) if how == "cut" else not files[which].exists()
    file.close()


MANY = [Question(f"q{n}", "Who?") for n in range(120)]


def take_turns(files):
    """Answers some questions at a time, every third in vain at first, until none is left."""
    while (file := AnswersFile(*files)).remaining(MANY):
        try:
            file.open_run(make_stamp(), HEADER)
        except ConfigError as error:
            assert "is being written by another process" in str(error)
            time.sleep(0.002)
            continue
        for number, question in enumerate(file.remaining(MANY)[:20]):
            file.append(failed(question.id) if number % 3 == 2 else answer(question.id))
            time.sleep(0.002)
        file.close()


@pytest.mark.slow
def test_two_processes_one_of_them_killed_again_and_again_lose_and_repeat_nothing(files):
    """A kill may come while lines are taken out, within a line, or between a trace and its answer."""
    context, rng, kept, kills = multiprocessing.get_context("fork"), random.Random(0), set(), 0
    first = context.Process(target=take_turns, args=(files,))
    first.start()
    while first.is_alive():
        second = context.Process(target=take_turns, args=(files,))
        second.start()
        time.sleep(rng.random() * 0.1)
        second.kill()
        second.join()
        kills += second.exitcode == -signal.SIGKILL
        text = files[0].read_text() if files[0].exists() else ""
        whole = {line for line in text.splitlines(True) if line.endswith("}\n") and '"error"' not in line}
        assert kept <= whole, "an answer is gone"
        kept = whole
    first.join()
    assert first.exitcode == 0 and kills > 1  # how many depends on the machine
    names, traced = ids(files)
    assert sorted(names) == sorted(traced) == sorted(question.id for question in MANY)
    assert kept <= set(files[0].read_text().splitlines(True)) and len(kept) > 40


def machines(files):
    return json.loads(files[0].with_name("a.jsonl.run.json").read_text())["machines"]


def test_a_run_that_goes_on_elsewhere_says_so_and_is_stamped(files, caplog, monkeypatch):
    run(files, [answer("q0")])
    assert machines(files) == [CPU]
    run(files, [failed("q1")])
    assert machines(files) == [CPU] and not caplog.records, "the same machine"
    run(files, [answer("q1")], machine=GPU)
    assert machines(files) == [CPU, GPU] and len(caplog.records) == 1
    assert caplog.messages[0] == (
        f"out={files[0]} holds answers made with device=cpu, name=a processor, attention=sdpa, threads=1, "
        "cuda=None, this run has device=cuda, name=a device, attention=flash, threads=None, cuda=12.9: "
        "rounding may differ, and with it an answer"
    )
    run(files, [failed("q2")])
    assert machines(files) == [CPU, GPU] and len(caplog.records) == 1, "both are known"
    stamp = make_stamp() | {"commit": "1a"}
    monkeypatch.setattr("tests.decode.test_answers_file.make_stamp", lambda: stamp)
    run(files, [answer("q2")])
    said = "was begun by dlm_rag of unknown version, now dlm_rag of unknown version (commit 1a)"
    assert caplog.messages[1:] == [f"out={files[0]} {said}: answers may differ"]
