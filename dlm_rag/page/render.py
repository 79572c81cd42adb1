"""What the page plays, as plain JSON: steps one by one, then what is known at the end.

    {"names": [...], "settings": [[...], ...], "left_out": 0, "questions": [
        {"id": "q1", "question": "...", "gold": ["..."], "hops": 2, "sides": [
            {"canvas": 96, "guesses": true, "ghosts": true, "settings": [...], "steps": [...],
             "end": {...}, "right": true}]}]}

A side is one trace of the question; two of them are shown side by side. `guesses`: whether it asks with
guesses; `ghosts`: whether its steps record them. What is not known is left out: `gold`, `hops`, `right`.

What a word is, and which passage it comes from, is decided here and nowhere in the page's script.
"""

import json
import math
import re
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from dlm_rag.decode.provisional_log import are_deltas_valid
from dlm_rag.decode.rollout import Rollout, RolloutStep, Span, describe_abstention, split_citable_spans
from dlm_rag.decode.trace_file import TraceHeader, read_trace, read_trace_header
from dlm_rag.errors import ConfigError, TraceError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import QUERIES, resolve_query_threshold
from dlm_rag.text import content_words, get_title_line, overlapping_spans, split_words, strip_disambiguation

PAGE_FOLDER = Path(__file__).parent
PAGE_MARKER = b"<!doctype html><!-- a page of dlm_rag -->"  # as page.html begins
EDITED_FLAG, END_FLAG = 1, 2  # of a written token: it took the place of another; it ends the text
MAX_CANVAS_TOKENS = 1 << 17  # positions, each an element of the page; no public model sees as far
# The settings of a trace that a page reads, with their types; others are shown as they are.
READ_SETTINGS = {"query_policy": str, "query_threshold": int | float, "abstain": str | None}
MAX_GAP_CHARS = 8  # characters between two tokens of a text: blanks, a character that is several tokens


class TraceRun(NamedTuple):
    """Rollouts of one setting."""

    name: str
    header: TraceHeader
    rollouts: Sequence[Rollout]


def read_trace_runs(paths: Sequence[Path]) -> list[TraceRun]:
    """The traces of these files, each named as briefly as tells them apart: by its name, folder, or path.

    Raises `TraceError` for anything else, or no question.
    """
    names = [str(path) for path in paths]
    for short in ([path.resolve().parent.name for path in paths], [path.stem for path in paths]):
        names = short if len({*short}) == len(paths) else names
    runs = []
    for path, name in zip(paths, names, strict=True):
        rollouts = list(read_trace(path))
        if not rollouts:
            raise TraceError(f"{path} holds no question that is finished: there is nothing to show")
        for rollout in rollouts:
            if not _is_sound(rollout):
                raise TraceError(f"{path}: the line of question '{rollout.id}' is not from a decode")
        runs.append(TraceRun(name, read_trace_header(path), rollouts))
    return runs


def _is_sound(rollout: Rollout) -> bool:
    """Whether steps and positions of a line, which others may have written, are those of a decode."""
    steps, length, settings = rollout.steps, rollout.canvas_length, rollout.settings
    places = [token.position for step in steps for token in step.written_tokens]
    places += [place for step in steps for place in step.remasked]
    return (
        0 <= length <= MAX_CANVAS_TOKENS
        and all(isinstance(settings[name], READ_SETTINGS[name]) for name in READ_SETTINGS.keys() & settings)
        and [step.step for step in steps] == [*range(len(steps))]
        and all(0 <= place < length for place in places)
        and are_deltas_valid((step.guesses for step in steps), length)
    )


def build_page_record(runs: Sequence[TraceRun], known: Iterable[Question] = ()) -> dict[str, Any]:
    """The data of a page; of several runs, the questions that all of them have, by id and text.

    known: questions with golden answers and hops. Raises `TraceError` where the runs have none in common.
    """
    by_key = [{(r.id, r.question): r for r in run.rollouts} for run in runs]
    common = [key for key in by_key[0] if all(key in rollouts for rollouts in by_key)]
    if not common:
        raise TraceError(
            f"the traces {' and '.join(run.name for run in runs)} have no question in common, of the same "
            "id and text: make both of the same questions"
        )
    settings = [run.header.settings for run in runs]
    names = [name for name in settings[0] if name not in ("batch_size", "overlap")]  # these change no token
    differing = [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]
    ends = [run.header.end_ids for run in runs]
    told = {(question.id, question.question): question for question in known}
    return {
        "names": [run.name for run in runs],
        "settings": [[f"decode.{name}={each.get(name)}" for name in differing] for each in settings],
        "left_out": len({key for rollouts in by_key for key in rollouts}) - len(common),
        "questions": [
            _build_question([rollouts[key] for rollouts in by_key], ends, told.get(key)) for key in common
        ],
    }


def _build_question(
    rollouts: Sequence[Rollout], ends: Sequence[Collection[int]], known: Question | None
) -> dict[str, Any]:
    record: dict[str, Any] = {"id": rollouts[0].id, "question": rollouts[0].question, "sides": []}
    gold, hops = (known.golden_answers, known.hops) if known else ((), None)
    record |= {name: value for name, value in (("gold", gold), ("hops", hops)) if value}
    for rollout, end_ids, bridges in zip(rollouts, ends, find_bridge_entities(rollouts), strict=True):
        seen: set[str] = set()
        side = build_start_record(rollout, any(step.guesses for step in rollout.steps))
        side["steps"] = [build_step_record(rollout, step, seen, end_ids) for step in rollout.steps]
        side["end"] = build_end_record(rollout, bridges)
        if gold:
            side["right"] = compute_exact_match(rollout.answer, gold) > 0
        record["sides"].append(side)
    return record


def build_start_record(rollout: Rollout, ghosts: bool) -> dict[str, Any]:
    """What is known before the first step."""
    settings = rollout.settings
    policy, threshold = settings.get("query_policy", ""), settings.get("query_threshold", math.inf)
    return {
        "canvas": rollout.canvas_length,
        "guesses": policy in QUERIES and resolve_query_threshold(policy, threshold) <= 1,
        "ghosts": ghosts,
        "settings": [f"decode.{key}={value}" for key, value in settings.items()],
    }


def build_step_record(
    rollout: Rollout, step: RolloutStep, seen: set[str], end_ids: Collection[int]
) -> dict[str, Any]:
    """One step, with the texts of passages that are not yet in `seen`, to which it adds them."""
    edited = {token.position for token in step.edited}
    new = [name for name in (*step.passage_ids, *step.dropped) if name not in seen]
    seen.update(new)
    guesses = step.guesses
    return {
        "query": step.query,
        "searched": step.retrieved,
        "passages": step.passage_ids,
        "dropped": step.dropped,
        "remasked": step.remasked,
        "written": [
            (
                token.position,
                token.token,
                round(token.confidence, 4),
                (token.position in edited) * EDITED_FLAG | (token.token_id in end_ids) * END_FLAG,
            )
            for token in step.written_tokens
        ],
        "ghosts": guesses
        and {
            "confidence": guesses.confidence,
            "changed": guesses.changed,
            "texts": [(token, text, (token in end_ids) * END_FLAG) for token, text in guesses.texts],
        },
        "texts": {
            name: {
                "title": split_content_words(get_title_line(text) or name),
                "body": split_content_words(text.strip().partition("\n")[2]),
            }
            for name, text in ((name, rollout.passages.get(name, "")) for name in new)
        },
    }


def build_end_record(rollout: Rollout, bridges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is known when the rollout is finished."""
    reason, closest, cited = rollout.abstain_reason, rollout.closest, [*rollout.sources]
    return {
        "response": rollout.response,
        "answer": rollout.answer,
        "abstained": describe_abstention(reason, closest) if reason else "",
        "closest": closest,
        "error": rollout.error,
        "words": attribute_words(rollout),
        "sources": [
            {
                "kind": unit["kind"],
                "text": split_content_words(unit["text"]),
                "unsupported": unit["unsupported"],
                "passages": [(p["id"], p["step"]) for p in unit["passages"] if p["id"] in cited],
            }
            for unit in rollout.citations
        ],
        "cited": cited,
        "bridges": bridges,
    }


def split_content_words(text: str) -> list[str | list[str]]:
    """A text cut up: [word], or [word, how it is compared], for content words, and what is between."""
    cut: list[str | list[str]] = []
    at = 0
    for word, (start, stop) in content_words(text, 0, len(text)):
        shown = text[start:stop]
        cut += [text[at:start], [shown] if shown == word else [shown, word]]
        at = stop
    return [piece for piece in (*cut, text[at:]) if piece]


def attribute_words(rollout: Rollout) -> list[dict[str, Any]]:
    """The content words of the response, each with its positions, last step, and the passage cited for it.

    The passage is None for a word that no passage in context held. Words that only passages hold which are
    not cited, as the fewest are, are left out. Nothing for a trace without citations.
    """
    last = rollout.final_tokens()
    spans = align_tokens((last[n].token for n in takewhile(last.__contains__, count())), rollout.response)
    steps = rollout.commit_steps()
    found = []
    units = split_citable_spans(rollout.response, rollout.answer_form)
    for (unit, _), cited in zip(units, rollout.citations, strict=False):
        for word, span in content_words(rollout.response, *unit):
            source = next((p["id"] for p in cited["passages"] if word in p["words"]), None)
            at = overlapping_spans(spans, *span)
            if at and (source is not None or word in cited["unsupported"]):
                step = max(steps[position] for position in at)
                found.append({"word": word, "at": at, "step": step, "passage": source})
    return found


def align_tokens(tokens: Iterable[str], text: str) -> list[Span]:
    """Where each token stands in a text that was made of them; without a tokenizer, so by their own texts.

    Blanks around a token are left out. Empty, where the token before ends, for a token that is not seen in
    the text: a special one, a part of a character, or one after the end.
    """
    spans, at = [], 0
    for token in tokens:
        shown = token.strip()
        start = text.find(shown, at, at + len(shown) + MAX_GAP_CHARS) if shown else -1
        spans.append((start, start + len(shown)) if start >= 0 else (at, at))
        at = spans[-1][1]
    return spans


def find_bridge_entities(rollouts: Sequence[Rollout]) -> list[list[dict[str, Any]]]:
    """The entities over which the answer is reached, with the steps at which each rollout gets to them.

    rollouts: of one question. A bridge is the title of a passage that one of them cites and that its
    question alone did not find; all words of the title, not all of which the question has, are in one of
    its queries. `asked`: the first step with such a query, `found`: with the passage as evidence; or None.
    """

    def first_query(rollout: Rollout, entity: str) -> int | None:
        sought = {*split_words(entity)}
        return next((s.step for s in rollout.steps if s.query and sought <= {*split_words(s.query)}), None)

    entities: dict[str, str] = {}
    for rollout in rollouts:
        first = [name for step in rollout.steps[:1] for name in (*step.passage_ids, *step.dropped)]
        for name in (p["id"] for unit in rollout.citations for p in unit["passages"]):
            entity = strip_disambiguation(get_title_line(rollout.passages.get(name, "")))
            new = not {*split_words(entity)} <= {*split_words(rollout.question)}
            if name not in first and new and first_query(rollout, entity) is not None:
                entities[name] = entity
    bridges = []
    for rollout in rollouts:
        reached: list[dict[str, Any]] = [
            {"passage": name, "entity": entity, "asked": first_query(rollout, entity),
             "found": next((s.step for s in rollout.steps if name in s.passage_ids), None)}
            for name, entity in entities.items()
        ]  # fmt: skip
        reached.sort(key=lambda bridge: math.inf if bridge["asked"] is None else bridge["asked"])
        bridges.append(reached)
    return bridges


def render_page(runs: Sequence[TraceRun], known: Iterable[Question] = ()) -> str:
    """The page of one run or of two, as `build_page_record`: one file, with its style, script and data."""
    title = "An answer being written, with a search at every step"
    return _render(title, build_page_record(runs, known), ("page.js",))


def render_live_page(keyed: bool, examples: Sequence[str] = (), about: str = "") -> str:
    """The chat of a server; keyed: whether it needs a key; examples: questions; about: what to ask."""
    buttons = (f'<button type="button">{escape(question)}</button>' for question in examples)
    form = _fill(
        "live.html", hidden="" if keyed else "hidden", about=escape(about), examples="\n    ".join(buttons)
    )
    empty: dict[str, Any] = {"names": [""], "settings": [[]], "left_out": 0, "questions": []}
    return _render("Ask", empty, ("page.js", "live.js"), form, "; connect-src 'self'")


def _render(
    title: str, record: Mapping[str, Any], scripts: Sequence[str], form: str = "", connect: str = ""
) -> str:
    """The page of a record; its policy allows its own style and scripts alone, and what `connect` says."""
    style, script = _fill("page.css"), "\n".join(map(_fill, scripts))
    # Escaped, no text ends the element that holds it (`</script>`), nor a line of script (U+2028).
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c")
    policy = f"default-src 'none'; style-src '{_csp_digest(style)}'; script-src '{_csp_digest(script)}'"
    parts = {"title": title, "style": style, "form": form, "data": data, "script": script}
    return _fill("page.html", policy=policy + connect, **parts)


def _fill(name: str, **parts: str) -> str:
    """A file of the page with its parts in place of `@name@`."""
    text = (PAGE_FOLDER / name).read_text(encoding="utf-8")
    return re.sub(f"@({'|'.join(parts)})@", lambda at: parts[at[1]], text) if parts else text


def _csp_digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def check_page_target(path: str) -> None:
    """Raises `ConfigError` for a file that exists and is not a page: it would be lost."""
    page = Path(path)
    if page.is_file():
        with page.open("rb") as file:
            begin = file.read(len(PAGE_MARKER))
        if begin not in (b"", PAGE_MARKER):
            raise ConfigError(f"html={path} is not a page of this program: choose another file")
