"""Who is asked what: questions in small shares, asked again where a worker died with them."""

from collections import Counter, deque
from collections.abc import Iterable

from dlm_rag.questions import Question

MAX_SHARED_DEATHS = 2  # deaths that a question may have seen among others; from then on it is asked alone
MAX_SOLO_DEATHS = 3  # deaths that it may cause alone


class QuestionQueue:
    """The questions of a run: waiting, held by a worker, or done; each in one of these at any time."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self._waiting = deque(questions)
        self._suspects: deque[Question] = deque()
        self._held: dict[int, dict[str, Question]] = {}
        self._deaths: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Whether every question was answered or given up."""
        return not (self._waiting or self._suspects or any(self._held.values()))

    def count_unanswered(self, worker: int) -> int:
        """How many questions a worker has that it has not answered."""
        return len(self._held.get(worker, ()))

    def assign(self, worker: int, most: int, workers: int) -> list[Question]:
        """What a worker is to be asked beside what it holds, up to `most` together.

        Of few that are left each of `workers` gets its part. A suspect is asked when nothing else waits,
        and alone.
        """
        held = self._held.setdefault(worker, {})
        if any(self._deaths[name] >= MAX_SHARED_DEATHS for name in held):
            return []
        if not self._waiting:
            given = [self._suspects.popleft()] if self._suspects and not held else []
        else:
            left = len(self._waiting) + sum(map(len, self._held.values()))
            fair = min(most, -(-left // workers)) - len(held)
            given = [self._waiting.popleft() for _ in range(min(fair, len(self._waiting)))]
        held.update({question.id: question for question in given})
        return given

    def mark_answered(self, worker: int, name: str) -> bool:
        """Takes note of an answer; whether it was this worker's to give."""
        return self._held.get(worker, {}).pop(name, None) is not None

    def requeue(self, worker: int) -> list[Question]:
        """What a worker held is to be asked again, first; returns what is given up instead."""
        held = list(self._held.pop(worker, {}).values())
        self._deaths.update(question.id for question in held)
        for question in reversed(held):
            if self._deaths[question.id] < MAX_SHARED_DEATHS:
                self._waiting.appendleft(question)
        suspects = [question for question in held if self._deaths[question.id] >= MAX_SHARED_DEATHS]
        given_up = [
            question
            for question in suspects
            if self._deaths[question.id] >= MAX_SHARED_DEATHS + MAX_SOLO_DEATHS
        ]
        self._suspects.extend(question for question in suspects if question not in given_up)
        return given_up
