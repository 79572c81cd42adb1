"""Files of questions: JSON lines, or the parquet of the SARDI data set."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_rag.errors import QuestionError, nearest
from dlm_rag.jsonl import is_blank, is_text, parse_object


@dataclass(frozen=True)
class Question:
    """A question with what is known about it; only `id` and `question` are needed to answer it."""

    id: str
    question: str
    golden_answers: tuple[str, ...] = ()
    supporting_ids: tuple[str, ...] = ()
    hops: int | None = None
    response: str | None = None  # what training is to teach: reasoning, `###`, the answer
    labels: tuple[str, ...] = ()  # fields that are true, by which results can be told apart


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a `.jsonl` or `.parquet` file, in order.

    Raises `QuestionError` naming file and line for what is no question: not JSON, not UTF-8, a
    blank text, an id that occurs twice; and for a file without questions.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise QuestionError(f"questions file '{path}' was not found")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    questions: dict[str, Question] = {}
    for place, row in rows:
        question = _parse(row, place)
        if question.id in questions:
            raise QuestionError(f"{place}: the id '{question.id}' occurs a second time")
        questions[question.id] = question
    if not questions:
        raise QuestionError(f"{path} holds no questions")
    return list(questions.values())


def typed_questions(texts: list[str]) -> list[Question]:
    """Questions typed by hand, with the ids q1, q2, ...; raises `QuestionError` for a blank one."""
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise QuestionError(f"question {number} is blank")
        if not is_text(text):
            raise QuestionError(f"question {number} is not UTF-8")
    return [Question(f"q{number}", text) for number, text in enumerate(texts, start=1)]


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not is_blank(line):
                place = f"{path}, line {number}"
                yield place, parse_object(line, place, QuestionError)


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise QuestionError(
            "parquet needs pyarrow: install it with `pip install 'dlm_rag[parquet]'`"
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise QuestionError(f"{path} is not a parquet file ({error})") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", {"id": str(number), **row}


def _parse(row: dict[str, Any], place: str) -> Question:
    text = row.get("question")
    if text is None:
        raise QuestionError(f"{place}: there is no 'question'{nearest('question', row)}")
    if not isinstance(text, str) or not text.strip():
        raise QuestionError(f"{place}: the question is blank")
    if row.get("id") is None:
        raise QuestionError(f"{place}: the question has no 'id'")
    hops, response = row.get("hops"), row.get("response")
    if response is not None and (not isinstance(response, str) or not response.strip()):
        raise QuestionError(f"{place}: the 'response' is no text")
    return Question(
        id=str(row["id"]),
        question=text,
        golden_answers=_texts(row, ("golden_answers", "answer"), place),
        supporting_ids=_texts(row, ("supporting_ids", "supporting_docs"), place),
        hops=hops if isinstance(hops, int) else None,
        response=response,
        labels=tuple(name for name, value in row.items() if value is True),
    )


def _texts(row: dict[str, Any], keys: tuple[str, ...], place: str) -> tuple[str, ...]:
    key = next((name for name in keys if row.get(name) is not None), None)
    if key is None:
        return ()
    value = row[key]
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str | int) for item in value):
        raise QuestionError(f"{place}: '{key}' must be a list of texts")
    return tuple(map(str, value))
