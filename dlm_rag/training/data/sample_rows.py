"""Typical rows of a step, for plans: full prompts, half of each canvas masked."""

import random
from collections.abc import Sequence

from dlm_rag.config import TrainConfig
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.data.example import Example

LONG_QUESTION_TOKENS = 64  # a long question of a world; small vocabularies need up to twice as many


def sample_document_rows(shape: DenoiserConfig, length: int, count: int) -> list[Example]:
    """`count` packed sequences of `length` tokens."""
    rng, hidden = random.Random(0), tuple(n % 2 == 0 for n in range(length))
    return [
        Example(Prompt((), (), ()), _draw_ids(rng, shape, length), hidden, (), 1.0, float(length))
        for _ in range(count)
    ]


def sample_prompt_rows(
    shape: DenoiserConfig, train: TrainConfig, top_k: int, rows: Sequence[int], searched: int = 1
) -> list[Example]:
    """Rows of items, `rows[n]` of item n; searched: how many times `top_k` passages an item has.

    Rows of an item with one search have their own questions; with several, one question.
    """
    rng, hidden = random.Random(0), tuple(n % 2 == 0 for n in range(shape.canvas_length))
    found = []
    for count in rows:
        passages = [_draw_ids(rng, shape, train.passage_length) for _ in range(searched * top_k)]
        asked = count if searched == 1 else 1
        questions = [_draw_ids(rng, shape, LONG_QUESTION_TOKENS) for _ in range(asked)]
        for row in range(count):
            first = row % ((searched - 1) * top_k + 1)
            facts = tuple(passages[first : first + top_k])
            prompt = Prompt(questions[row % len(questions)], facts, ())
            found.append(Example(prompt, _draw_ids(rng, shape, shape.canvas_length), hidden))
    return found


def _draw_ids(rng: random.Random, shape: DenoiserConfig, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(shape.vocab_size) for _ in range(length))
