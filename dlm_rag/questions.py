"""Questions: from files and pipes, typed by hand, or a sample of them."""

import html
import json
import logging
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from dlm_rag.cli import print_note
from dlm_rag.config import Config
from dlm_rag.errors import QuestionError, suggest_nearest
from dlm_rag.files import record_readers
from dlm_rag.files.paths import expand_path, resolve_regular_file
from dlm_rag.files.record_readers import FIELD_ALIASES, QUESTION_IDS, get_field, is_missing, write_number
from dlm_rag.text import normalize_text, normalize_whitespace, replace_control_chars

log = logging.getLogger(__name__)

_SPLIT = re.compile(r"(?<![a-z])(?:train|dev|val|valid|validation|eval|test|corpus)(?![a-z])", re.I)
_ENTITY = re.compile(r"&(?:amp|quot|apos|lt|gt|nbsp|[lr][sd]quo|#\d{1,6}|#x[\da-fA-F]{1,5});")  # of HTML
IMAGE_FIELDS = ("image", "images", "image_url")
# A list, an object of SQuAD or TriviaQA; the film "[REC]" is neither.
_NESTED = re.compile(
    r"\s*(\[\s*(?:[-\d\[\"'{].*)?\]|\{\s*['\"](?:text|value|aliases|normalized_\w+|matched_\w+)['\"].*\})\s*",
    re.DOTALL,
)


@dataclass(frozen=True)
class Question:
    """A question and what is known about it. Answering needs only `id` and `question`."""

    id: str
    question: str
    golden_answers: tuple[str, ...] = ()
    supporting_ids: tuple[str, ...] = ()
    hops: int | None = None
    response: str | None = None  # what training is to teach: reasoning, `###`, the answer
    labels: tuple[str, ...] = ()  # fields that are true, its type: by which results can be told apart
    place: str = field(default="", compare=False, repr=False)  # in its file, for errors
    supporting_titles: tuple[str, ...] = ()  # of the supporting passages, where a file says no ids
    system: str = ""  # a system prompt, which stands in the prompt and in no query

    def __post_init__(self) -> None:
        if not isinstance(self.question, str):
            raise QuestionError(f"the question is {type(self.question).__name__}: give a text")
        object.__setattr__(self, "question", _tidy(self.question))
        for name in ("golden_answers", "supporting_ids", "labels", "supporting_titles"):
            value = getattr(self, name)  # of one's own code: a text, a list
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))


def _tidy(text: str) -> str:
    text = _ENTITY.sub(lambda found: html.unescape(found[0]), text)
    return normalize_whitespace(replace_control_chars(normalize_text(text)))


Askable = str | Question | Mapping[str, Any]


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a file in any form of `read_records`, in order; `-` is standard input.

    A folder stands for the files in it, as `dlm-rag synthesize` leaves them (`list_row_files`). A pipe, and
    a file that is `.txt` or has no suffix, may also hold plain lines, one question each; they are called
    q1, q2, ... What is marked `answerable: false` (MuSiQue-Full) is left out, and said so. Raises
    `QuestionError` naming file and line for a blank text, a second id, a file without questions.
    """
    questions: dict[str, Question] = {}
    unanswerable = 0
    for place, row in read_question_records(path):
        row = record_readers.flatten_layout(row)
        answerable, impossible = (str(row.get(key)).lower() for key in ("answerable", "is_impossible"))
        if answerable.strip() in ("false", "0") or impossible.strip() in ("true", "1"):
            unanswerable += 1
            continue
        question = _parse_question(row, place)
        if question.id in questions:
            raise QuestionError(f"{place}: the id '{question.id}' occurs a second time")
        questions[question.id] = question
    if unanswerable:
        log.info("%s: %s questions without an answer are left out", path, f"{unanswerable:,}")
    if not questions:
        raise QuestionError(f"{'standard input' if str(path) == '-' else path} holds no questions")
    return list(questions.values())


def read_question_records(path: str | Path) -> Iterator[record_readers.Record]:
    """The records of a file of questions, with whatever fields they have."""
    if str(path) == "-":
        stream, name = getattr(sys.stdin, "buffer", None), Path("standard input")
        if stream is None or stream.closed:
            raise QuestionError("--questions - reads standard input, which is closed")
        if stream.isatty():
            print_note("questions from the keyboard, one a line; Ctrl-D ends them")
        yield from record_readers.read_record_stream(stream, name, QuestionError, plain="question")
        return
    found = expand_path(path, QuestionError)
    if found.is_fifo() or found.is_char_device():  # both are read once, as they come
        with found.open("rb") as file:
            yield from record_readers.read_record_stream(file, found, QuestionError, plain="question")
        return
    if not found.is_dir():
        found = resolve_regular_file(path, "questions file", QuestionError)
    files = record_readers.list_row_files(found, QuestionError) if found.is_dir() else [found]
    if len({split[0][:3].lower() for file in files if (split := _SPLIT.search(file.name))}) > 1:
        raise QuestionError(f"'{found}' holds several splits: name a file, or a folder of one of them")
    for each in files:
        yield from record_readers.read_records(each, QuestionError, plain="question")


def as_questions(questions: Askable | Iterable[Askable]) -> list[Question]:
    """The list of `number_questions`; raises `QuestionError` for an id twice as well."""
    asked = list(number_questions(questions))
    if len({question.id for question in asked}) < len(asked):
        raise QuestionError("two questions have the same id")
    return asked


def number_questions(questions: Askable | Iterable[Askable]) -> Iterator[Question]:
    """Questions as records, one by one as they come; texts get the ids q1, q2, ... by their place.

    A dict is a row of a file of questions. Where the locale is ASCII, Python has kept what else was typed
    as single bytes. Raises `QuestionError` for a blank question, half of a character, and other types.
    """
    given = record_readers.list_table_rows(questions)
    given = [questions] if isinstance(questions, str | bytes | Question | Mapping) else given
    if not isinstance(given, Iterable):
        given = [given]
    for number, each in enumerate(given, start=1):
        if isinstance(each, Mapping):
            row = record_readers.flatten_layout(dict(each))
            others = [value for key, value in row.items() if str(key).lower() in QUESTION_IDS]
            names = (get_field(row, "id")[1], *others, f"q{number}")
            row["id"] = next(name for name in names if not is_missing(name) and str(name).strip())
            each = _parse_question(row, f"question {number}")
        if not isinstance(each, str | Question):
            raise QuestionError(
                f"question {number} is {type(each).__name__}: give a text, a dict with 'question', or a "
                "Question; to decode(), several"
            )
        text = each if isinstance(each, str) else each.question
        if not _tidy(text):
            raise QuestionError(f"question {number} is blank")
        try:
            text = text.encode(errors="surrogateescape").decode()
        except UnicodeError:
            raise QuestionError(f"question {number}: the text is not UTF-8") from None
        yield Question(f"q{number}", text) if isinstance(each, str) else each


def select_questions(questions: list[Question], config: Config) -> list[Question]:
    """`limit` questions, drawn evenly over hops and labels; in file order.

    The numbers of hops take turns, within each the labels, and each of these gives its questions in a
    random order that is always the same: a larger limit draws the same questions and more.
    """
    if config.limit is None:
        return questions
    kinds: dict[int | None, dict[tuple[str, ...], list[int]]] = {}
    for place, question in enumerate(questions):
        kinds.setdefault(question.hops, {}).setdefault(question.labels, []).append(place)
    for hops, labelled in kinds.items():
        for labels, places in labelled.items():
            random.Random(f"quick/{hops}/{labels}").shuffle(places)
    drawn = _take_turns([_take_turns([*labelled.values()]) for labelled in kinds.values()])[: config.limit]
    return [questions[place] for place in sorted(drawn)]


def _take_turns(lists: list[list[int]]) -> list[int]:
    return [place for turn in zip_longest(*lists) for place in turn if place is not None]


def _parse_question(row: dict[str, Any], place: str) -> Question:
    name, text = get_field(row, "question")
    if image := next((key for key in IMAGE_FIELDS if row.get(key)), None):
        raise QuestionError(f"{place}: the question comes with an '{image}', and only texts are answered")
    if text is None:
        raise QuestionError(f"{place}: there is no 'question'{suggest_nearest('question', row)}")
    if not isinstance(text, str) or not _tidy(text):
        raise QuestionError(f"{place}: the '{name}' must be a text that is not blank")
    response, hops = row.get("response"), row.get("hops")
    if response is not None and (not isinstance(response, str) or not response.strip()):
        raise QuestionError(f"{place}: the 'response' is no text")
    if hops is not None and not re.fullmatch(r"[1-9]\d?(\.0)?", str(hops)):
        raise QuestionError(f"{place}: 'hops' must be a whole number from 1 to 99")
    own, kind = record_readers.get_record_id(row, "question", place, QuestionError), row.get("type")
    answers, others = (_parse_texts(row, name, place) for name in ("golden_answers", "answer_aliases"))
    own_names = ("answerable", *FIELD_ALIASES["golden_answers"])  # yes is an answer, no label
    golden = (*_read_choices(row, answers, place), *others)
    read = ((normalize_whitespace(answer), _tidy(answer)) for answer in golden)  # as a model does
    folded = [answer for plain, answer in read if answer not in ("", plain)]
    labels = [name for name, value in row.items() if value is True and str(name).lower() not in own_names]
    labels += [kind] if isinstance(kind, str) and record_readers.TYPE_LABEL.fullmatch(kind) else []
    return Question(
        id=own,
        question=text,
        golden_answers=tuple(dict.fromkeys((*golden, *folded))),
        supporting_ids=_parse_texts(row, "supporting_ids", place),
        supporting_titles=record_readers.list_supporting_titles(row, place, QuestionError),
        hops=record_readers.count_hops(row, own) if hops is None else int(float(hops)),
        response=response,
        labels=tuple(labels),
        place=place,
    )


def _read_choices(row: dict[str, Any], answers: tuple[str, ...], place: str) -> tuple[str, ...]:
    """The answers; of a multiple choice (MMLU, ARC) the texts that they name by label, or number from 0."""
    columns, said = (row.get("choices"), row.get("options")), get_field(row, "golden_answers")[1]
    given = next((each for each in columns if not is_missing(each)), None)
    if isinstance(given, str) and re.match(r"\s*[\[{]\s*['\"]", given):
        raise QuestionError(f'{place}: the choices are not JSON, as ["a", "b"] is')
    letters = {key: text for key, text in row.items() if len(str(key)) == 1 and not is_missing(text)}
    if given is None and "A" in letters and str(said) in letters:  # a column each (MMMLU)
        given = {key: letters[key] for key in ascii_uppercase if key in letters}
    texts, own = given, None
    if isinstance(given, dict):  # of ARC; the texts by their labels (MedQA)
        texts, own = given.get("text", [*given.values()]), given.get("label", [*given])
    if isinstance(texts, str | dict) or not isinstance(texts, Iterable):
        return answers
    if not all(isinstance(text, str | int | float) for text in texts):
        raise QuestionError(f"{place}: the choices must be a list of texts")
    texts = [*map(write_number, texts)]
    labels = [*ascii_uppercase[: len(texts)], *range(len(texts))] if own is None else own
    by_text, by_label = {text: text for text in texts}, dict(zip(map(str, labels), texts * 2, strict=False))
    named = by_label | by_text if isinstance(said, str) and own is None else by_text | by_label
    found = tuple(named[answer] for answer in answers if answer in named)
    wrong = [
        answer for answer in answers if answer not in named and not (found and answer in ("yes", "no"))
    ]
    if wrong:  # but for the word of a truth value, which stands beside the text that says it
        raise QuestionError(f"{place}: '{wrong[0]}' names no choice: give its label or its text")
    return found


def _parse_texts(row: dict[str, Any], field: str, place: str) -> tuple[str, ...]:
    """A text or a list of texts, also of SQuAD's and TriviaQA's objects and of JSON in a table's cell; of
    supporting passages that are objects the ids, none if one has no id."""
    key, value = get_field(row, field)
    value = value.tolist() if hasattr(value, "tolist") else [*value] if isinstance(value, tuple) else value
    if isinstance(value, str) and _NESTED.fullmatch(value):
        try:
            text, value = value, json.loads(value)
        except (ValueError, RecursionError):
            raise QuestionError(f'{place}: \'{key}\' is not JSON, as ["a", "b"] is') from None
        numbers = len(value) > 1 and all(type(each) in (int, float) for each in value)
        if numbers and field == "golden_answers" and not {"choices", "options"} & row.keys():
            value = [*value, text]  # numbers that are each an answer, or an interval
    if isinstance(value, dict):
        own = {key.lower(): each for key, each in value.items()}
        names = [own["value"], *(own.get("aliases") or ())] if own.get("value") else value
        value = own.get("text", names)
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if field == "supporting_ids" and all(isinstance(item, dict) for item in texts):
        if texts and not isinstance(value, list) and texts[0].get("id") is None:
            raise QuestionError(f"{place}: '{key}' must be a list of ids")
        texts = [item.get("id") for item in texts]
        texts = [] if None in texts else texts
    if field in ("golden_answers", "answer_aliases"):
        spelled = list[Any]()
        texts = [item.get("text") if isinstance(item, dict) else item for item in texts]  # SQuAD's
        for item in texts:  # a truth value is its word; of a text that says it, as tables do, both
            item = item.rpartition("\n#### ")[2] if isinstance(item, str) else item  # GSM8K's solutions
            word = {"true": "yes", "false": "no"}.get(str(item).strip().lower())
            spelled += [item] if word is None else [word] if isinstance(item, bool) else [word, item]
        texts = spelled
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in texts):
        raise QuestionError(f"{place}: '{key}' must be a list of texts")
    return tuple(write_number(text) for text in texts if not is_missing(text) and str(text).strip())
