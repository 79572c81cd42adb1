"""Training rows from traces of questions: what a model wrote itself, kept where the filters say so."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dlm_rag.config import SynthesisConfig
from dlm_rag.decode.rollout import Rollout
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.questions import Question, read_questions
from dlm_rag.text import FUNCTION_WORDS, MAX_TITLE_WORDS, extract_names, split_words

EVALUATION_NGRAM_WORDS = 12  # that a row may not share with an evaluation set
CitationUnits = Sequence[Mapping[str, Any]]  # units of `citations.cite_passages`
Ngrams = set[tuple[str, ...]]


def make_trace_rows(
    rollouts: Iterable[Rollout], questions: Sequence[Question], config: SynthesisConfig, evaluated: Ngrams
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The rows in the order of their questions, and counts of them and of what was left out, by reason.

    Left out are traces that the filter does not let pass, questions that share words with an evaluation set
    (`evaluated`, as `collect_evaluation_ngrams` has them), and questions that an earlier row asks already.
    """
    asked = {question.id: question for question in questions}
    counts, kept = Counter(rows=0), dict[str, dict[str, Any]]()
    for rollout in rollouts:
        if rollout.id not in asked:
            continue
        found = check_trace(rollout, asked[rollout.id])
        if rollout.error:
            counts["failed"] += 1
        elif reason := find_drop_reason(found, config):
            counts[f"left out: {reason}"] += 1
        else:
            kept[rollout.id] = make_row(rollout, asked[rollout.id], found)
    rows, lengths, seen = [], {len(gram) for gram in evaluated}, set[str]()
    for row in (kept[question.id] for question in questions if question.id in kept):
        said = split_words(row["question"])
        if any(gram in evaluated for size in lengths for gram in _iterate_ngrams(said, size)):
            counts["left out: in an evaluation set"] += 1
        elif " ".join(said) in seen:
            counts["left out: equal to an earlier row"] += 1
        else:
            seen.add(" ".join(said))
            rows.append(row)
    counts["rows"] = len(rows)
    return rows, dict(sorted(counts.items()))


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


def collect_evaluation_ngrams(against: str | None) -> Ngrams:
    """Returns runs of `EVALUATION_NGRAM_WORDS` words of questions, a shorter question whole.

    against: files of questions, by commas. Raises `QuestionError`.
    """
    found: Ngrams = set()
    for path in against.split(",") if against else []:
        for question in read_questions(path.strip()):
            said = split_words(question.question)
            found.update(_iterate_ngrams(said, min(EVALUATION_NGRAM_WORDS, len(said))))
    return found - {()}


def _iterate_ngrams(said: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(said[n : n + size]) for n in range(len(said) - size + 1))
