"""The canvas: what may be committed, what never changes, when the text is certain."""

import random

import numpy as np
import pytest

from dlm_rag.engine.row import Canvas, find_commit_span
from dlm_rag.engine.rules import Proposals
from dlm_rag.engine.step import name_tokens

MASK, END = 256, 257


def propose(positions, token_ids, confidence):
    others = dict.fromkeys(("confidence", "log_prob", "entropy", "margin"), confidence)
    return Proposals.from_arrays(positions=positions, token_ids=token_ids, **others)


def put(canvas, tokens):
    positions = np.array(sorted(tokens))
    ids = np.array([tokens[p] for p in sorted(tokens)])
    proposals = propose(positions, ids, np.ones(len(ids)))
    canvas.commit(proposals)
    return proposals


class ByteTokenizer:
    """A token for each byte, so that most characters are several."""

    def token_text(self, token):
        return self.decode_with_offsets([token])[0]

    def decode_with_offsets(self, ids):
        return bytes(ids).decode(errors="replace"), []


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_tokens_make_the_response_in_whatever_order_they_are_written(seed):
    rng, held, text = random.Random(seed), {}, "Petroșani, 東京 🙂 Łódź!"
    tokens = text.encode()
    canvas, order = Canvas(len(tokens), MASK), [*range(len(tokens))]
    rng.shuffle(order)
    while order:
        now, order = order[: (n := rng.randint(1, 9))], order[n:]
        proposals = put(canvas, {p: tokens[p] for p in now})
        held |= {token.position: token.token for token in name_tokens(proposals, canvas, ByteTokenizer())}
    assert "".join(held[p] for p in sorted(held)) == text


def candidates(canvas, block_length, begin=0, end=6):
    """Where a step may commit."""
    first, last = find_commit_span(canvas.masked, (begin, end), block_length)
    return [n for n in range(max(0, first), last) if canvas.masked[n]]


def test_only_the_first_unfinished_block_may_be_committed():
    canvas = Canvas(6, MASK)
    assert candidates(canvas, None) == [0, 1, 2, 3, 4, 5]
    assert candidates(canvas, 4) == [0, 1, 2, 3]
    put(canvas, {0: 1, 1: 2, 2: 3})
    assert candidates(canvas, 4) == [3]
    put(canvas, {3: 4})
    assert candidates(canvas, 4) == [4, 5]
    with pytest.raises(ValueError, match="committed already|committed again"):
        put(canvas, {1: 8})
    assert canvas.ids.tolist()[:4] == [1, 2, 3, 4]


def test_blocks_within_a_block_of_attention_are_counted_from_where_it_begins():
    """Attention in blocks of 6 that begin 2 tokens before the canvas; commits in blocks of 3."""
    canvas = Canvas(9, MASK)
    assert candidates(canvas, 3, -2, 4) == [0]
    put(canvas, {0: 1})
    assert candidates(canvas, 3, -2, 4) == [1, 2, 3]
    assert candidates(canvas, None, -2, 4) == [1, 2, 3]
    assert candidates(canvas, 8, -2, 4) == [1, 2, 3], "never beyond the block"


def test_another_token_replaces_a_committed_one_behind_what_is_closed():
    canvas = Canvas(4, MASK, frozen_length=0)
    put(canvas, {0: 5, 1: 6, 2: 7})
    confidence = np.array([0.9, 0.4, 0.9, 0.9])
    found = propose(np.arange(4), np.array([8, 8, 7, 8]), confidence)
    assert canvas.edit(found, 0.5).positions.tolist() == [0], "neither unsure, nor the same, nor a mask"
    assert canvas.ids.tolist() == [8, 6, 7, MASK]
    canvas.frozen_length = 2
    assert canvas.edit(found, 0.0).positions.tolist() == []
    assert canvas.ids.tolist() == [8, 6, 7, MASK]
    put(canvas, {3: END})
    assert not canvas.is_finished({END}) and not canvas.is_finished(()), "what may be edited is not certain"
    canvas.frozen_length = 4
    assert canvas.is_finished(())


def test_guesses_enter_by_confidence_and_leave_the_canvas_alone():
    canvas = Canvas(3, MASK)
    put(canvas, {0: 5})
    confidence = np.array([0.9, 0.3])
    guesses = propose(np.array([1, 2]), np.array([6, 7]), confidence)
    assert canvas.fill_provisional(guesses, 0.5) == [5, 6, MASK]
    assert canvas.fill_provisional(guesses, 0.0) == [5, 6, 7]
    assert canvas.fill_provisional(guesses, 2.0) == [5, MASK, MASK] == canvas.ids.tolist()


@pytest.mark.parametrize(
    ("tokens", "certain"),
    [
        ({0: 1, 1: END}, True), ({1: END}, False), ({0: 1, 2: END}, False), ({0: 1, 1: 2}, False),
        ({0: 1, 1: 2, 2: 3, 3: 4}, True),
    ],
)  # fmt: skip
def test_the_text_is_certain_once_nothing_before_an_end_token_is_masked(tokens, certain):
    canvas = Canvas(4, MASK)
    put(canvas, tokens)
    assert canvas.is_finished({END}) == certain
    assert canvas.is_finished(()) == (len(tokens) == 4)
