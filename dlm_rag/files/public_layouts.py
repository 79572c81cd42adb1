"""What rows of public multi-hop data sets say besides question and answer: support, contexts, hops, type.

Read are HotpotQA, 2WikiMultihopQA and MuSiQue as they were published and in the hub's parquet (columns in
an object, JSON in a text), FlashRAG, which keeps the original's fields in `metadata`, and SARDI.
"""

import html
import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from dlm_rag.errors import UserError

# Of HotpotQA (Yang et al. 2018) and 2WikiMultihopQA (Ho et al. 2020): passages that the type needs.
HOPS_BY_TYPE = {"bridge": 2, "comparison": 2, "compositional": 2, "inference": 2, "bridge_comparison": 4}
LAYOUT_FIELDS = (
    "type", "supporting_facts", "context", "paragraphs", "question_decomposition", "evidences",
    "answerable", "answer_aliases",
)  # fmt: skip
_MUSIQUE_ID = re.compile(r"([2-4])hop\d?__")
_LABEL = re.compile(r"[A-Za-z][\w-]{0,39}")
_QUOTED_TITLE = re.compile(r'"([^\n]+)"\n')  # of FlashRAG's passages
_SENTENCE_FIELDS = ("sentences", "content", "paragraph_text", "text")


def flatten_layout(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the fields of a public layout at the top, and what JSON in a text holds as values."""
    metadata = _decode(row.get("metadata"))
    found = dict(row)
    for name in LAYOUT_FIELDS:
        value = row.get(name)
        if value is None and isinstance(metadata, dict):
            value = metadata.get(name)
        if value is not None:
            found[name] = _decode(value)
    return found


def list_supporting_titles(row: dict[str, Any], place: str, error: type[UserError]) -> tuple[str, ...]:
    """The titles of the passages that support a question, each once, in the order of a flattened row."""
    facts, paragraphs = row.get("supporting_facts"), row.get("paragraphs")
    steps, docs = row.get("question_decomposition"), row.get("supporting_docs")
    titles: list[Any] = []
    if facts is not None:
        titles = [title for title, _ in _pair_up(facts, "supporting_facts", place, error)]
    elif isinstance(paragraphs, list):
        chosen = [each for each in paragraphs if isinstance(each, dict) and each.get("is_supporting")]
        titles = [title for title, _ in _pair_up(chosen, "paragraphs", place, error)]
    elif isinstance(steps, list):
        found = [step.get("support_paragraph") for step in steps if isinstance(step, dict)]
        titles = [each["title"] for each in found if isinstance(each, dict) and each.get("title")]
    elif isinstance(docs, list):
        titles = [_find_title(doc) for doc in docs if isinstance(doc, dict)]
        titles = [] if None in titles else titles
    return tuple(dict.fromkeys(title for title in titles if isinstance(title, str) and title.strip()))


def count_hops(row: dict[str, Any], name: str) -> int | None:
    """Hops as MuSiQue's ids and decompositions say them, else by type, else by evidences; None if unknown.

    name: the id of the question.
    """
    if found := _MUSIQUE_ID.match(name):
        return int(found[1])
    if steps := row.get("question_decomposition"):
        return len(steps) if isinstance(steps, list) else None
    evidences, kind = row.get("evidences"), row.get("type")
    if isinstance(kind, str) and kind in HOPS_BY_TYPE and {"supporting_facts", "context"} & {*row}:
        return HOPS_BY_TYPE[kind]
    return len(evidences) if isinstance(evidences, list) and evidences else None


def get_type_label(row: dict[str, Any]) -> str | None:
    """The type of a question, where it can be the name of a group: one word."""
    kind = row.get("type")
    return kind if isinstance(kind, str) and _LABEL.fullmatch(kind) else None


def list_context_passages(
    row: dict[str, Any], place: str, error: type[UserError]
) -> list[tuple[str, str]] | None:
    """Title and text of each passage that comes with a question; None where none can come with it."""
    row = flatten_layout(row)
    name = next(
        (name for name in ("context", "paragraphs") if isinstance(row.get(name), list | dict)), None
    )
    if name is None:
        return None
    found = []
    for title, said in _pair_up(row[name], name, place, error):
        sentences = said if isinstance(said, list) else [said]
        if not all(isinstance(text, str) for text in (title, *sentences)):
            raise error(f"{place}: the passages in '{name}' must be a title and sentences, which are texts")
        found.append((title, " ".join(text.strip() for text in sentences if text.strip())))
    return [(title, text) for title, text in found if text]


def normalize_title(title: str) -> str:
    """What two spellings of a title have in common: quotes around it, white space and escapes are none."""
    return " ".join(unicodedata.normalize("NFC", html.unescape(title)).split()).strip('" ')


def get_first_line_title(text: str) -> str:
    """The title of a passage by its text, which begins with it (`Passage.text`), normalized."""
    return normalize_title(text.partition("\n")[0])


def _decode(value: Any) -> Any:
    """A value, or what JSON in a text holds, as cells of tables and some parquets have it."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # a text that begins so
        return value


def _pair_up(value: Any, name: str, place: str, error: type[UserError]) -> Iterator[tuple[Any, Any]]:
    """Titles and what stands with each: of pairs, objects, an object of columns, or titles alone."""
    if isinstance(value, dict) and isinstance(titles := value.get("title"), list):
        columns = (each for key, each in value.items() if key != "title" and isinstance(each, list))
        others = next(columns, [""] * len(titles))
        if len(others) == len(titles):
            yield from zip(titles, others, strict=True)
            return
    for item in value if isinstance(value, list) else [None]:
        if isinstance(item, str):
            yield item, ""
        elif isinstance(item, list) and len(item) == 2:
            yield item[0], item[1]
        elif isinstance(item, dict) and "title" in item:
            yield item["title"], next((item[key] for key in _SENTENCE_FIELDS if key in item), "")
        else:
            raise error(f"{place}: '{name}' must be pairs of a title and what belongs to it")


def _find_title(doc: dict[str, Any]) -> str | None:
    if isinstance(title := doc.get("title"), str):
        return title
    quoted = _QUOTED_TITLE.match(str(doc.get("contents") or ""))
    return quoted[1] if quoted else None


def read_answer_aliases(lines: Iterator[tuple[str, dict[str, Any]]]) -> dict[str, list[str]]:
    """The names of each answer by its id, as 2WikiMultihopQA's `id_aliases.json` has them."""
    return {
        str(row.get("Q_id")): [str(n) for n in (*(row.get("aliases") or ()), *(row.get("demonyms") or ()))]
        for _, row in lines
    }
