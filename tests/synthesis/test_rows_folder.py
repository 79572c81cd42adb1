"""The folder of rows: the same bytes whatever was killed, no row twice, nothing of an evaluation set."""

import json
import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest

from dlm_rag.errors import ConfigError
from dlm_rag.questions import read_questions
from dlm_rag.synthesis.rows_folder import COLUMNS, JOURNAL, RowsFolder, SourceOutcome
from tests.support.passages import write_jsonl_file
from tests.support.rows import SETTINGS, make_outcome


def make(folder, outcomes, against=None, complete=True, stop=False):
    """A run that goes on where the one before was stopped; returns its counts. stop: before the files."""
    rows = RowsFolder(folder, SETTINGS, model="tiny")
    rows.begin({"command": "test"})
    try:
        for each in () if rows.complete else outcomes:
            if each.source not in rows.done:
                rows.append_outcome(each)
        return None if rows.complete or stop else rows.finish(against, complete)
    finally:
        rows.close()


def contents(folder: Path):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_files_are_in_the_order_of_the_sources_whatever_order_they_were_done_in(tmp_path):
    every = [make_outcome(place) for place in range(20)]
    counts = make(tmp_path / "a", every)
    random.Random(0).shuffle(every)
    assert make(tmp_path / "b", every) == counts
    one, other = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert one == other
    assert sorted(one) == ["held_out/rows.jsonl", "rows.json", "rows.jsonl"]
    assert [q.id for q in read_questions(tmp_path / "a")] == [f"s{n}#0" for n in range(20)]
    assert [q.id for q in read_questions(tmp_path / "a" / "held_out")] == [f"s{n}#1" for n in range(20)]
    assert counts == {
        "sources": 20, "rows: what": 20, "held out: what": 20, "left out: not linked": 20,
        "writer: requests": 200,
    }  # fmt: skip


def test_rows_have_all_columns(tmp_path):
    full = {"id": "a", "question": "Who?", "golden_answers": ["A", "B"], "hops": 2, "source_ids": [],
            "template": "what", "held_out": False}  # fmt: skip
    rows = [full, {"id": "b", "question": "Where?", "template": "what"}]
    make(tmp_path, [SourceOutcome(0, "s", rows)])
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert [list(row) for row in found] == [list(COLUMNS)] * 2
    known = {"model": "tiny", "settings": found[0]["settings"]}
    known |= {key: value for key, value in full.items() if key in COLUMNS}
    assert {key: value for key, value in found[0].items() if value is not None} == known
    assert len(found[0]["settings"]) == 16 and found[1]["id"] == "b" and found[1]["hops"] is None


def test_a_kill_at_any_byte_of_the_journal_loses_and_repeats_nothing(tmp_path):
    every = [make_outcome(place) for place in range(6)]
    make(tmp_path / "whole", every)
    whole = contents(tmp_path / "whole")
    make(tmp_path / "journal", every, stop=True)
    journal = (tmp_path / "journal" / JOURNAL).read_bytes()
    note = (tmp_path / "journal" / "rows.json").read_bytes()
    for end in range(0, len(journal), 37):
        folder = tmp_path / f"killed-{end}"
        folder.mkdir()
        (folder / JOURNAL).write_bytes(journal[:end])
        (folder / "rows.json").write_bytes(note)
        make(folder, every)
        assert contents(folder) == whole, end


def test_a_folder_that_is_complete_is_left_alone_and_what_failed_is_asked_again(tmp_path):
    every = [make_outcome(place) for place in range(5)]
    make(tmp_path, every[:3], complete=False)
    assert len(read_questions(tmp_path)) == 3 and (tmp_path / JOURNAL).exists()
    make(tmp_path, every)
    before = contents(tmp_path)
    assert len(read_questions(tmp_path)) == 5
    assert make(tmp_path, [make_outcome(9)]) is None and contents(tmp_path) == before


JOURNALED = json.dumps({"place": 0, "source": "s", "rows": [], "counts": {}})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (JOURNAL, f'{JOURNALED}\n{{"place": "a", "source": "s", "rows": []}}\n', "line 2: place: "),
        (JOURNAL, "my notes\nof today", "line 1: the line is not JSON"),
        ("rows.json", '"complete": "yes"', "rows.json: complete: "),
    ],
)
def test_what_another_program_left_is_named_and_stays(tmp_path, name, text, says):
    make(tmp_path, [make_outcome(0)], complete=False)
    if name != JOURNAL:
        note = json.loads((tmp_path / name).read_text()) | json.loads(f"{{{text}}}")
        text = json.dumps(note)
    (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=says):
        make(tmp_path, [make_outcome(0), make_outcome(1)])
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [JOURNAL, "rows.jsonl", "held_out"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    """As a folder that was handed on may have one."""
    make(tmp_path / "rows", [make_outcome(0)], complete=False)
    (tmp_path / "rows" / name).rename(tmp_path / "mine")
    (tmp_path / "rows" / name).symlink_to(tmp_path / "mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
        make(tmp_path / "rows", [make_outcome(0), make_outcome(1)])
    assert contents(tmp_path) == before


def test_other_settings_other_folders_and_a_second_process_are_refused(tmp_path):
    make(tmp_path / "a", [make_outcome(0)], complete=False)
    with pytest.raises(ConfigError, match="holds rows with synthesis.method=corpus, this run has traces"):
        RowsFolder(tmp_path / "a", {"synthesis.method": "traces"})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds 'thesis.tex', which is of no rows"):
        RowsFolder(tmp_path / "b", SETTINGS)
    first, second = RowsFolder(tmp_path / "a", SETTINGS), RowsFolder(tmp_path / "a", SETTINGS)
    first.begin({})
    with pytest.raises(ConfigError, match="is being written by another process"):
        second.begin({})
    first.close()


def questions(texts, template="what"):
    return [{"id": str(n), "question": text, "template": template} for n, text in enumerate(texts)]


def kept(folder, rows, against=None):
    """The places of the rows that are kept."""
    rows = [row | {"id": str(n)} for n, row in enumerate(rows)]
    make(folder, [SourceOutcome(0, "s", rows)], against)
    path = folder / "rows.jsonl"
    return [int(json.loads(line)["id"]) for line in path.open()] if path.exists() else []


def test_equal_rows_are_left_out_by_their_template(tmp_path):
    texts = ["Who wrote Emma?", "who wrote emma", "Where is it?"]
    assert kept(tmp_path / "a", questions(texts)) == [0, 2]
    both = [*questions(texts[:1]), *questions(texts[:2], "complete")]
    assert kept(tmp_path / "b", both) == [0, 1]


def test_what_shares_twelve_words_with_an_evaluation_set_is_left_out(tmp_path):
    words = [f"w{n}" for n in range(20)]
    asked = [" ".join(words), "Who wrote Emma?"]
    sets = [
        str(write_jsonl_file(tmp_path / f"{n}.jsonl", [{"id": "q", "question": text}]))
        for n, text in enumerate(asked)
    ]
    shared = [f"so {' '.join(words[5 : 5 + count])}" for count in (12, 11)]
    rows = questions([*shared, "Tell me: who wrote Emma, please?", "Who wrote Persuasion?"])
    assert kept(tmp_path / "both", rows, ",".join(sets)) == [1, 3]
    assert kept(tmp_path / "one", rows, sets[1]) == [0, 1, 3]


def slowly(folder: Path) -> None:
    """A run of a hundred sources, each of which takes a moment."""

    def each():
        for place in random.sample(range(100), 100):
            time.sleep(0.001)
            yield make_outcome(place)

    make(folder, each())


@pytest.mark.slow
def test_kills_lose_no_row_and_make_none_twice(tmp_path):
    """At any moment: while the journal grows, while files are written, while they take their places."""
    make(tmp_path / "whole" / "rows", [make_outcome(place) for place in range(100)])
    fork, rng, kills = multiprocessing.get_context("fork"), random.Random(5), 0
    folder = tmp_path / "killed" / "rows"
    rounds = 0
    while kills < 12:
        process = fork.Process(target=slowly, args=(folder,))
        process.start()
        process.join(rng.uniform(0.005, 0.08 if rounds % 2 else 0.25))
        if process.is_alive():
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
            continue
        assert process.exitcode == 0
        check_same(folder, tmp_path / "whole" / "rows", 100)
        folder, rounds = tmp_path / f"killed-{rounds}" / "rows", rounds + 1
    slowly(folder)
    check_same(folder, tmp_path / "whole" / "rows", 100)


def check_same(folder, whole, sources):
    ids = [q.id for side in ("", "held_out") for q in read_questions(folder / side)]
    assert len(ids) == len(set(ids)) == 2 * sources
    names = sorted(name for name in contents(whole) if name.endswith("rows.jsonl"))
    assert names == sorted(name for name in contents(folder) if name.endswith("rows.jsonl"))
    assert all((folder / name).read_bytes() == (whole / name).read_bytes() for name in names)
