"""A long rollout that is made up, for tests of the page: a token, a changed passage, new guesses a step."""

import numpy as np
from numpy.typing import NDArray

from dlm_rag.decode.provisional_log import ProvisionalDelta, ProvisionalRecorder
from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep

PASSAGES_PER_STEP = 7


def make_synthetic_rollout(steps: int, tokens: int) -> Rollout:
    """A rollout that writes its tokens out of order, one a step."""
    recorder = ProvisionalRecorder(lambda token: f" guess{token}")
    places = [number * 7919 % tokens for number in range(tokens)]  # a prime, so each of them once
    written = [CommittedToken(place, 2, f" word{place}", (place % 100) / 100) for place in places]
    asked = "Why?"
    taken = [RolloutStep(0, asked, tuple(f"p{n}" for n in range(PASSAGES_PER_STEP)), True)]
    for number in range(1, steps + 1):
        part = tuple(written[(number - 1) * tokens // steps : number * tokens // steps])
        asked += "".join(token.token for token in part)
        found = tuple(f"p{number + n}" for n in range(PASSAGES_PER_STEP))
        left = np.array(sorted(places[number * tokens // steps :]), dtype=np.int64)
        taken.append(
            RolloutStep(
                number, asked, found, True, part, guesses=make_provisional_tokens(recorder, left, number)
            )
        )
    names = [f"p{n}" for n in range(steps + PASSAGES_PER_STEP)]
    return Rollout(
        id="synthetic",
        question="Why?",
        prompt_layout="joint",
        canvas_length=tokens,
        steps=taken,
        response="".join(f" word{n}" for n in range(tokens)).strip(),
        passages={name: f"Title {name}\n" + "some words of a passage " * 20 for name in names},
        settings={"query_policy": "proxy", "query_threshold": 0.0},
        finished=True,
    )


def make_provisional_tokens(
    recorder: ProvisionalRecorder, positions: NDArray[np.int64], step: int
) -> ProvisionalDelta:
    """Guesses of which a tenth are others than a step before, and all are more or less sure."""
    token = (7 * positions + (positions + step) // 10) % 5000
    sure = (37 * positions + 11 * step) % 100 / 100
    guesses = zip(token.tolist(), sure.tolist(), strict=True)
    return recorder.record_step(dict(zip(positions.tolist(), guesses, strict=True)))
