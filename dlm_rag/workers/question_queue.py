"""Which worker is asked which question; the questions of a worker that died are asked again."""

from collections import Counter, deque
from collections.abc import Iterable

from dlm_rag.questions import Question

MAX_SHARED_DEATHS = 2  # deaths of a question's worker after which it is asked alone
MAX_SOLO_DEATHS = 3  # deaths of a worker that had this question alone, after which it is given up


class QuestionQueue:
    """The questions of a run; each is waiting, held by a worker, or done."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self._waiting = deque(questions)
        self._suspects: deque[Question] = deque()
        self._held: dict[int, dict[str, Question]] = {}
        self._deaths: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Whether every question was answered or given up."""
        return not (self._waiting or self._suspects or any(self._held.values()))

    def assign(self, worker: int, most: int, workers: int) -> list[Question]:
        """New questions for a worker, which then holds at most `most`; the last are shared evenly.

        A suspect is asked alone, once nothing else waits.
        """
        held = self._held.setdefault(worker, {})
        if any(self._deaths[name] >= MAX_SHARED_DEATHS for name in held):
            return []
        if self._waiting:
            unanswered = len(self._waiting) + sum(map(len, self._held.values()))
            fair = min(most, -(-unanswered // workers)) - len(held)
            given = [self._waiting.popleft() for _ in range(min(fair, len(self._waiting)))]
        else:
            given = [self._suspects.popleft()] if self._suspects and not held else []
        held.update({question.id: question for question in given})
        return given

    def mark_answered(self, worker: int, name: str) -> None:
        del self._held[worker][name]

    def requeue(self, worker: int) -> list[Question]:
        """Queues again, first of all, what a dead worker held; returns the questions that are given up."""
        given_up = []
        for question in reversed(self._held.pop(worker, {}).values()):
            self._deaths[question.id] += 1
            if self._deaths[question.id] < MAX_SHARED_DEATHS:
                self._waiting.appendleft(question)
            elif self._deaths[question.id] < MAX_SHARED_DEATHS + MAX_SOLO_DEATHS:
                self._suspects.append(question)
            else:
                given_up.append(question)
        return given_up
