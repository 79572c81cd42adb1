"""What a client shows of a finished answer: the reasoning, the answer, its sources."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_rag.decode.abstention import ABSTAIN_REASONS
from dlm_rag.decode.rollout import Rollout
from dlm_rag.serving.requests import ParsedRequest
from dlm_rag.text import find_answer_span, get_title_line

# What may be the beginning of a mark of the answer, which a stream of the reasoning must not run over.
_MARK_START = re.compile(r"[#\\<]")
_MARK_BEFORE_ANSWER = re.compile(r"\s*(#+|\\boxed\{|<answer>)\s*$")


@dataclass(frozen=True)
class Reply:
    """The reasoning, the content of a message, OpenAI's annotations of it, the sources with their texts."""

    reasoning: str
    content: str
    annotations: list[dict[str, Any]]
    sources: list[dict[str, Any]]

    def build_source_events(self) -> Iterator[dict[str, Any]]:
        """What Open WebUI shows who clicks on a source, with its text; none where none is annotated."""
        for each in self.sources if self.annotations else ():
            place = {"source": each["url"], "name": each["title"]}
            data = {"source": {"name": each["title"], "url": each["url"]}, "metadata": [place]}
            yield {
                "type": "source",
                "data": data | {"document": [each["text"]], "distances": [each["score"]]},
            }


def cut_open_reasoning(text: str, answer_form: str) -> str:
    """What is reasoning for certain of a text that still grows: up to what may mark the answer."""
    if answer_form == "whole":
        return ""
    found = _MARK_START.search(text)
    text = text[: found.start() if found else None]
    return text[: find_answer_span(text)[0]].rstrip()


def build_reply(
    rollout: Rollout, text: str, asked: ParsedRequest, link: Callable[[str, str], str], note: str
) -> Reply:
    """The reply of a finished answer.

    text: of the response up to a stop text. link: the address of a passage, of its id and text. note: what
    stands below the answer, what the model knows; "" for nothing.
    """
    sources = _list_sources(rollout, link)
    if asked.plain:
        return Reply("", text, [], sources)
    start, stop = find_answer_span(text, rollout.answer_form)
    reason = rollout.abstain_reason
    reasoning = _MARK_BEFORE_ANSWER.sub("", text[:start].rstrip())
    answer = "" if reason else text[start:stop]
    if asked.json_fields:
        known = {"answer": answer, "reasoning": reasoning, "sources": [each["title"] for each in sources]}
        held = {name: known[name] for name in asked.json_fields}
        return Reply(reasoning, json.dumps(held, ensure_ascii=False), [], sources)
    content = answer or text
    if reason:
        content = f"I do not know: {ABSTAIN_REASONS[reason]}."
    if not asked.cite or reason:
        return Reply(reasoning, content, [], sources)
    # What the answer is cited from; where that is nothing, what the reasoning is.
    units = [unit for unit in rollout.citations if unit["kind"] == "answer" and unit["passages"]]
    cited = {passage["id"] for unit in units or rollout.citations for passage in unit["passages"]}
    marks = (f" [{number}]" for number, each in enumerate(sources, start=1) if each["id"] in cited)
    lines = [f"[{number}] {each['title']}" for number, each in enumerate(sources, start=1)]
    parts = (content + "".join(marks), "\n".join(lines), note)
    whole = "\n\n".join(filter(None, parts))
    return Reply(reasoning, whole, _annotate(whole, len(content), sources), sources)


def _annotate(content: str, start: int, sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's url_citation of every source, by its number, at its first mark from `start` on."""
    annotations = []
    for number, each in enumerate(sources, start=1):
        mark = f"[{number}]"
        begin = content.index(mark, start)
        place = {"start_index": begin, "end_index": begin + len(mark)}
        found = place | {"title": each["title"], "url": each["url"]}
        annotations.append({"type": "url_citation", "url_citation": found})
    return annotations


def _list_sources(rollout: Rollout, link: Callable[[str, str], str]) -> list[dict[str, Any]]:
    """The passages that are cited, in the order in which they are first; score: the share of the words of
    reasoning and answer, function words aside, that are cited from the passage.
    """
    held: dict[str, int] = {}
    for unit in rollout.citations:
        for passage in unit["passages"]:
            held[passage["id"]] = held.get(passage["id"], 0) + len(passage["words"])
    every = sum(held.values()) + sum(len(unit["unsupported"]) for unit in rollout.citations)
    sources = []
    for name, words in held.items():
        text = rollout.passages[name]
        found = {"id": name, "title": get_title_line(text) or name, "text": text}
        sources.append(found | {"score": round(words / every, 4), "url": link(name, text)})
    return sources
