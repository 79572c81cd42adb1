"""Files of questions."""

import pytest
from conftest import write_lines

from dlm_rag.errors import QuestionError
from dlm_rag.questions import Question, read_questions


def test_all_fields_of_the_contract(tmp_path):
    path = write_lines(
        tmp_path / "q.jsonl",
        [
            {"id": 1, "question": "Who?", "golden_answers": ["A", "B"], "supporting_ids": ["x"], "hops": 2},
            {"id": "2", "question": "Where?"},
        ],
    )
    assert read_questions(path) == [Question("1", "Who?", ("A", "B"), ("x",), 2), Question("2", "Where?")]


def test_parquet_of_the_sardi_data_set(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"question": ["Who?", "Where?"], "answer": ["A", "B"], "supporting_docs": [["x", "y"], []]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "q.parquet")
    assert read_questions(tmp_path / "q.parquet") == [
        Question("1", "Who?", ("A",), ("x", "y")),
        Question("2", "Where?", ("B",)),
    ]
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(QuestionError, match="is not a parquet file"):
        read_questions(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{\n", "line 2: the line is not JSON"),
        (b'{"id": "b", "question": " "}\n', "line 2: the question is blank"),
        (b'{"id": "b", "qestion": "x"}\n', "line 2: there is no 'question' (nearest: 'qestion')"),
        (b'{"question": "x"}\n', "line 2: the question has no 'id'"),
        (b'{"id": "a", "question": "x"}\n', "line 2: the id 'a' occurs a second time"),
        (b'{"id": "b", "question": "\xff"}\n', "line 2: the line is not UTF-8"),
        (b'{"id": "b", "question": "x", "golden_answers": [[1]]}\n', "line 2: 'golden_answers' must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    (tmp_path / "q.jsonl").write_bytes(b'{"id": "a", "question": "x"}\n' + line)
    with pytest.raises(QuestionError) as error:
        read_questions(tmp_path / "q.jsonl")
    assert says in str(error.value)


def test_blank_lines_and_a_byte_order_mark_do_no_harm(tmp_path):
    (tmp_path / "q.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "a", "question": "x"}\r\n\n')
    assert read_questions(tmp_path / "q.jsonl") == [Question("a", "x")]


def test_no_file_and_no_questions(tmp_path):
    with pytest.raises(QuestionError, match="was not found"):
        read_questions(tmp_path / "q.jsonl")
    (tmp_path / "q.jsonl").touch()
    with pytest.raises(QuestionError, match="holds no questions"):
        read_questions(tmp_path / "q.jsonl")
