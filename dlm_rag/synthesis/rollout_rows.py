"""Reasoning traces of questions: decoded by the usual loop, kept where the filters say so."""

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from dlm_rag.config import SynthesisConfig
from dlm_rag.decode.rollout import Rollout
from dlm_rag.questions import Question
from dlm_rag.synthesis.shards import SourceOutcome
from dlm_rag.synthesis.trace_filters import check_trace, find_drop_reason
from dlm_rag.tokenizer import Tokenizer

DecodeFunction = Callable[[list[Question]], Iterator[Rollout]]


class TraceRowGenerator:
    """What becomes of questions; `failed` counts those that had no answer, which are asked again."""

    def __init__(self, questions: list[Question], config: SynthesisConfig, tokenizer: Tokenizer) -> None:
        self._asked = {question.id: (place, question) for place, question in enumerate(questions)}
        self._config, self._tokenizer = config, tokenizer
        self.failed = 0

    def __len__(self) -> int:
        return len(self._asked)

    def remaining(self, done: set[str]) -> list[Question]:
        """The questions that are not done."""
        return [question for name, (_, question) in self._asked.items() if name not in done]

    def outcomes(self, rollouts: Iterator[Rollout]) -> Generator[SourceOutcome]:
        """What becomes of each question, as its rollout is finished."""
        for rollout in rollouts:
            if rollout.error:
                self.failed += 1
                continue
            place, question = self._asked[rollout.id]
            found = check_trace(rollout, question)
            row = self._make_row(rollout, question, found)
            spent = {"response_tokens": row["response_tokens"], "forwards": rollout.forwards}
            reason = find_drop_reason(found, self._config)
            rows = [] if reason else [row]
            yield SourceOutcome(place, rollout.id, rows, {reason: 1} if reason else {}, spent)

    def _make_row(self, rollout: Rollout, question: Question, found: Mapping[str, bool]) -> dict[str, Any]:
        """The question with its trace; its supporting_ids are the passages that the trace cites."""
        cited = [p["id"] for unit in rollout.citations for p in unit["passages"]]
        evidence = [rollout.evidence_texts.get(name, "") for name in rollout.evidence]
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
            "prompt_tokens": len(self._tokenizer.build_prompt(rollout.question, evidence)),
            "response_tokens": len(self._tokenizer.encode(rollout.response)),
        }
