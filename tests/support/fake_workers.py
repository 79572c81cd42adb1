"""A decoder without a model for tests of workers: imported there, so nothing heavy is imported here."""

import os
import signal
import time
from dataclasses import dataclass, field

from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.errors import CorpusError
from dlm_rag.questions import Question

STEPS = 3  # of each question


@dataclass(frozen=True)
class FakeStats:
    """As `DecoderStats`: a word, and how many questions."""

    answers: int = 0

    def __add__(self, other):
        return FakeStats(self.answers + other.answers)

    def describe(self):
        return f"{self.answers} answered"


@dataclass
class FakeDecoder:
    """Its own engine; a question says what becomes of it."""

    places: int
    seconds: float  # of a step
    stats: FakeStats = FakeStats()
    rows: list = field(default_factory=list)
    record_provisional: bool = False

    def new_engine(self):
        return self

    @property
    def capacity(self):
        return self.places - len(self.rows)

    def submit(self, question, guesses=False):
        assert self.capacity > 0
        self.rows.append([question, 0])

    def step(self):
        time.sleep(self.seconds)
        events = []
        for row in list(self.rows):
            row[1] += 1
            if row[0].question == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if row[0].question == "raise":
                raise CorpusError("the corpus has changed")
            if row[1] == STEPS:
                self.rows.remove(row)
                events.append(FakeEvent(make_finished_rollout(row[0])))
        self.stats = FakeStats(self.stats.answers + len(events))
        return events


@dataclass(frozen=True)
class FakeEvent:
    rollout: Rollout
    finished: bool = True


def make_finished_rollout(question: Question, error: str = "") -> Rollout:
    """What is answered to a question."""
    said = "" if error else f"### {question.id}"
    steps = [RolloutStep(0, None, (), retrieved=False, seconds={"denoise": 1.0})]
    return Rollout(
        question.id, question.question, "joint", 8, steps, response=said, finished=True, error=error
    )


@dataclass(frozen=True)
class FakeDecoderFactory:
    """As `a DecoderFactory of workers`."""

    places: int = 4
    seconds: float = 0.02
    dies_while_loading: bool = False

    def __call__(self, sharing):
        if self.dies_while_loading:
            os.kill(os.getpid(), signal.SIGKILL)
        return FakeDecoder(self.places, self.seconds), {"name": "a machine", "sharing": sharing}
