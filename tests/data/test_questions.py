"""Files of questions, and which of them are chosen."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dlm_rag.config import Config, DecodeConfig
from dlm_rag.errors import QuestionError
from dlm_rag.questions import Question, as_questions, read_questions, select_questions
from dlm_rag.retrieval.corpus import open_corpus
from tests.support.passages import write_jsonl_file


def test_a_folder_stands_for_the_files_of_rows_in_it(tmp_path):
    """By name; notes, hidden files and folders below are none of it."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": ["c"], "question": ["When?"]}), tmp_path / "rows-1.parquet")
    write_jsonl_file(
        tmp_path / "rows-0.jsonl", [{"id": "a", "question": "Who?"}, {"id": "b", "question": "Where?"}]
    )
    write_jsonl_file(tmp_path / ".journal.jsonl", [{"id": "d", "question": "Why?"}])
    (tmp_path / "README.md").write_text("# Rows")
    (tmp_path / "note.json").write_text("{}")
    (tmp_path / "held_out").mkdir()
    write_jsonl_file(tmp_path / "held_out" / "rows-0.jsonl", [{"id": "e", "question": "How?"}])
    assert [question.id for question in read_questions(tmp_path)] == ["a", "b", "c"]


@pytest.mark.parametrize("other", ["validation-00000-of-00001.jsonl", "corpus.jsonl", "my_Test_1.csv"])
def test_a_folder_of_several_splits_is_not_read_as_one(tmp_path, other):
    for name in (
        "train-00000-of-00002.jsonl",
        "train-00001-of-00002.jsonl",
        "latest.jsonl",
        "devices.jsonl",
    ):
        write_jsonl_file(tmp_path / name, [{"id": name, "question": "Who?"}])
    assert len(read_questions(tmp_path)) == 4
    (tmp_path / other).write_text('{"id": "x", "question": "Where?"}\n')
    with pytest.raises(QuestionError, match="several splits"):
        read_questions(tmp_path)


def test_an_empty_cell_of_a_table_is_missing_whatever_its_column():
    """Here as pandas has them: NaN where only other rows have the field."""

    class Table:
        columns = ("id",)

        def to_dict(self, form):
            kept = {"question": "Who?", "type": math.nan, "hops": math.nan, "response": math.nan,
                    "supporting_facts": np.float64("nan"), "image": math.nan}  # fmt: skip
            return [{"id": "a", "metadata": {"type": "bridge"}, **kept}, {"id": "b", **kept, "hops": 3.0}]

    first, second = as_questions(Table())
    assert (first.hops, first.labels, second.hops) == (2, ("bridge",), 3)


def test_all_fields_and_the_names_that_other_data_sets_give_them(tmp_path):
    rows = [
        {"id": 1, "question": "Who?", "golden_answers": ["A", "B"], "supporting_ids": ["x"], "hops": 2},
        {"_id": "a", "text": "Who?", "metadata": {}},  # BEIR
        {"id": "b", "query": "Who?", "text": "A passage.", "answer": "x"},
        {"id": "d", "question": "Who?", "answers": {"text": ["x", "y"], "answer_start": [1, 2]}},  # SQuAD
        {"id": "e", "question": "Who?", "answer": [1931.0, math.nan], "hops": 2.0},  # pandas
        {"id": "f", "question": "Who?", "answer": math.nan, "answerable": True},
        {"id": "g", "text": "?", "answerable": "False"}, {"id": "h", "text": "?", "is_impossible": "True"},
    ]  # fmt: skip
    assert read_questions(write_jsonl_file(tmp_path / "q.jsonl", rows)) == [
        Question("1", "Who?", ("A", "B"), ("x",), 2), Question("a", "Who?"), Question("b", "Who?", ("x",)),
        Question("d", "Who?", ("x", "y")), Question("e", "Who?", ("1931",), hops=2), Question("f", "Who?"),
    ]  # fmt: skip
    for given in ("x", "y"), np.array(["x", "y"]):  # of one's own code, of a table of pandas
        assert as_questions({"question": "Who?", "answers": given})[0].golden_answers == ("x", "y")
    (tmp_path / "q.txt").write_text("[REC] was by whom?\r{x} was?\u2028Who?\n")
    texts = ["[REC] was by whom?", "{x} was?", "Who?"]
    assert [each.question for each in read_questions(tmp_path / "q.txt")] == texts
    with pytest.raises(QuestionError, match="'supporting_ids' must be a list of ids"):
        read_questions(write_jsonl_file(tmp_path / "r", [{**rows[1], "supporting_ids": {"d1": 1}}]))


def test_an_answer_counts_as_it_is_written_and_as_it_is_read(tmp_path):
    rows = [
        {"id": n, "question": "x", "answer": said}
        for n, said in enumerate(("AT&amp;T", "Men’s\u00a0wear", "[2, 5]"))
    ]
    read = read_questions(write_jsonl_file(tmp_path / "q.jsonl", rows))
    assert [each.golden_answers for each in read] == [
        ("AT&amp;T", "AT&T"), ("Men’s\u00a0wear", "Men's wear"), ("2", "5", "[2, 5]"),
    ]  # fmt: skip


def test_ids_of_questions_are_none_of_passages(tmp_path):
    rows = [{"qid": 1, "text": "a"}, {"qid": 1, "text": "b"}]
    path = write_jsonl_file(tmp_path / "c.jsonl", rows)
    assert [passage.id for passage in open_corpus(path, tmp_path)] == ["1", "2"]
    assert read_questions(write_jsonl_file(tmp_path / "q.jsonl", rows[:1]))[0].id == "1"


def test_a_limit_draws_evenly_over_hops_and_a_larger_one_the_same_and_more():
    """Of a file that begins with its easy questions, as those of invented worlds do."""
    asked = [Question(str(n), "?", hops=1 + n // 100) for n in range(400)]
    counts = (1, 3, 40, 41, 200, 399, 400, 9999)
    drawn = {count: select_questions(asked, Config(limit=count)) for count in counts}
    assert Counter(q.hops for q in drawn[40]) == dict.fromkeys((1, 2, 3, 4), 10)
    assert [len(questions) for questions in drawn.values()] == [1, 3, 40, 41, 200, 399, 400, 400]
    sets = [{q.id for q in questions} for questions in drawn.values()]
    assert all(fewer <= more for fewer, more in pairwise(sets))
    assert all(q == sorted(q, key=lambda q: int(q.id)) for q in drawn.values()), "the file's order"
    assert drawn[200] == select_questions(asked, Config(limit=200))
    other_seed = Config(limit=40, decode=DecodeConfig(seed=7))
    assert drawn[40] == select_questions(asked, other_seed), "whatever the seed"
