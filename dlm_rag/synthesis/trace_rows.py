"""Reasoning traces of questions: decoded by the usual loop, kept where the filters say so."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from dlm_rag.config import SynthesisConfig
from dlm_rag.decode.rollout import Rollout
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.questions import Question
from dlm_rag.synthesis.rows_folder import SourceOutcome
from dlm_rag.text import FUNCTION_WORDS, MAX_TITLE_WORDS, extract_names, split_words

CitationUnits = Sequence[Mapping[str, Any]]  # units of `citations.cite_passages`


class TraceRowGenerator:
    """What becomes of questions; `failed` counts those that had no answer, which are asked again."""

    def __init__(
        self,
        questions: list[Question],
        config: SynthesisConfig,
        decode: Callable[[list[Question]], Iterable[Rollout]],
    ) -> None:
        """decode: gives the rollouts of questions as they are finished."""
        self._places = {question.id: place for place, question in enumerate(questions)}
        self._questions, self._config, self._decode, self.failed = questions, config, decode, 0

    def __len__(self) -> int:
        return len(self._questions)

    def outcomes(self, done: set[str]) -> Generator[SourceOutcome]:
        """What becomes of each question that is not done, as its rollout is finished."""
        remaining = [question for question in self._questions if question.id not in done]
        for rollout in self._decode(remaining) if remaining else ():
            if rollout.error:
                self.failed += 1
                continue
            place = self._places[rollout.id]
            question = self._questions[place]
            found = check_trace(rollout, question)
            if reason := find_drop_reason(found, self._config):
                yield SourceOutcome(place, rollout.id, [], {f"left out: {reason}": 1})
            else:
                yield SourceOutcome(place, rollout.id, [make_row(rollout, question, found)])


def make_row(rollout: Rollout, question: Question, found: Mapping[str, bool]) -> dict[str, Any]:
    """Returns the question with its trace; its supporting_ids are the passages that the trace cites."""
    cited = [p["id"] for unit in rollout.citations for p in unit["passages"]]
    return {
        "id": rollout.id,
        "question": rollout.question,
        "golden_answers": list(question.golden_answers) or [rollout.answer],
        "supporting_ids": list(dict.fromkeys(cited)),
        "hops": question.hops or sum(unit["kind"] == "reasoning" for unit in rollout.citations) or None,
        "response": rollout.response,
        "source_ids": [rollout.id],
        "template": "trace",
        "filters": [name for name, holds in found.items() if holds],
    }


def check_trace(rollout: Rollout, question: Question) -> dict[str, bool]:
    """What holds of a trace, by name; in the order in which a missing one is named as the reason.

    answer: it ends in a known answer (only where one is known). cited: every sentence of the reasoning, of
    which there is at least one, and the answer cite a passage. supported: see `is_supported`.
    linked: see `is_linked`. hops: there are as many sentences as the question has hops (where known).
    """
    reasoning = [unit for unit in rollout.citations if unit["kind"] == "reasoning"]
    answer = [unit for unit in rollout.citations if unit["kind"] == "answer"]
    found = {}
    if question.golden_answers:
        found["answer"] = compute_exact_match(rollout.answer, question.golden_answers) == 1.0
    found["cited"] = bool(reasoning and answer) and all(unit["passages"] for unit in rollout.citations)
    found["supported"] = is_supported(rollout, reasoning, answer)
    found["linked"] = is_linked(rollout, reasoning)
    if question.hops is not None:
        found["hops"] = len(reasoning) == question.hops
    return found


def is_supported(rollout: Rollout, reasoning: CitationUnits, answer: CitationUnits) -> bool:
    """Whether each sentence has one passage that bears it out, and the last one's the answer too.

    Every name and number of a sentence stands in one of the passages that it cites, and was written with a
    passage in context that holds it; so does every word of the answer. Other words may be the trace's own
    ("it lies in", where the passage says "its home is").
    """
    needed = [extract_names(unit["text"]) for unit in reasoning]
    if not needed or any(extract_names(unit["text"]) & {*unit["unsupported"]} for unit in reasoning):
        return False
    if any(unit["unsupported"] for unit in answer):
        return False
    needed[-1] |= {*split_words(rollout.answer)}
    return all(
        any(names <= {*split_words(rollout.passages[passage["id"]])} for passage in unit["passages"])
        for names, unit in zip(needed, reasoning, strict=True)
    )


def is_linked(rollout: Rollout, reasoning: CitationUnits) -> bool:
    """Whether a trace is one chain from the question to its answer.

    A passage that a sentence cites is about something that was named before: by the question for the first
    sentence, by the sentence before for each other. The answer stands in the last sentence. What a passage
    is about is its title, its first line; where that is none, a word that both share and the question lacks
    will do.
    """
    before, asked = rollout.question, {*split_words(rollout.question)} | FUNCTION_WORDS
    for number, unit in enumerate(reasoning):
        sentence, passages = unit["text"], unit["passages"]
        titles = [split_words(rollout.passages[passage["id"]].partition("\n")[0]) for passage in passages]
        known = [title for title in titles if len(title) <= MAX_TITLE_WORDS]
        named = any(contains_words(split_words(before), title) for title in known)
        shared = {*split_words(before)} & {*split_words(sentence)} - (asked if number else FUNCTION_WORDS)
        if not passages or not (named if known else shared):
            return False
        before = sentence
    return bool(reasoning) and contains_words(split_words(before), split_words(rollout.answer))


def contains_words(said: Sequence[str], part: Sequence[str]) -> bool:
    """Whether words stand in a text one after another; False for no words."""
    size = len(part)
    return bool(size) and any(said[n : n + size] == part for n in range(len(said) - size + 1))


def find_drop_reason(found: dict[str, bool], config: SynthesisConfig) -> str:
    """The first check that a trace would have to pass and does not; "" for one that is kept."""
    needed = ["answer", "cited"] if config.filter == "answer" else ["cited", "supported", "linked"]
    return next((f"not {name}" for name in needed if not found.get(name, False)), "")
