"""Neighbours made to agree: marginals against enumeration, what is written against the prompt."""

import collections
import itertools
import math

import numpy as np
import pytest
import torch

from dlm_rag import Decoder
from dlm_rag.decode import sampling
from dlm_rag.decode.copy_sources import (
    SOURCE_FIXED,
    SOURCE_UNKNOWN,
    CopySources,
    SeparatorTokens,
    batch_copy_sources,
)
from dlm_rag.diffusion.copy_crf import CopyCRF, apply_copy_crf, estimate_crf_bytes
from dlm_rag.tokenizer import Prompt
from dlm_rag.training.planning.memory_tracker import MemoryTracker
from tests.support.decoding import QUESTIONS, make_decoder, rollout_records
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

V, END, JOINT = 7, 4, 5  # tokens; one behind which any may begin, one that may follow any
ROWS = [  # texts, what stands around positions that are asked about (None), prices
    ([[1, 3, 4, 5], [3, 1]], [3, None, None, 1, None], 1.7),
    ([[0, 1, 2, 3, 4, 6]], [None, None, None], 0.8),
    ([[6, 2, 2]], [5, None, "free", None, None, 6], 3.0),
]


class Words:
    """Joints of a vocabulary of seven numbers."""

    pieces, ids = ([JOINT],), frozenset({JOINT})

    def may_end_piece(self, token):
        return token == END


def chains_of(rows):
    """The logits that each row begins with, and `CopyCRF`."""
    copyings, chains, first, begin = [], [], [], 0
    for texts, stands, _ in rows:
        source, count = [], 0
        for each in stands:
            source.append(count if each is None else SOURCE_UNKNOWN if each == "free" else SOURCE_FIXED)
            count += each is None
        copyings.append(
            CopySources.from_prompt(Prompt(tuple(texts[0]), tuple(map(tuple, texts[1:])), ()), Words())
        )
        chains.append(
            np.array(
                [
                    source,
                    [each if at == SOURCE_FIXED else 0 for each, at in zip(stands, source, strict=True)],
                ]
            )
        )
        first.append(begin)
        begin += count
    arrays = [
        *batch_copy_sources(copyings, chains, first),
        np.array([price for _, _, price in rows], np.float32),
    ]
    return first, CopyCRF(*map(torch.from_numpy, arrays))


def enumerated(probability, texts, stands, price):
    """The marginals (n, V), by all ways to copy the positions from places, or from none."""
    pieces = [*texts, [JOINT]]
    places = [(piece, n) for piece, text in enumerate(pieces) for n in range(len(text))]
    token_of = {place: pieces[place[0]][place[1]] for place in places}
    holding = collections.Counter(token_of.values())
    # those of no text by themselves
    states = [*places, *(token for token in range(V) if token not in holding)]

    def step(one, other):
        """T, of places or free tokens."""
        share = 1 / holding[token_of[other]] if other in token_of else 1
        if one not in token_of or other not in token_of:
            return share
        costs = (token_of[one] == END) == (token_of[other] == JOINT)
        return share * math.exp(-price * costs) + (1 - math.exp(-price)) * (other == (one[0], one[1] + 1))

    def may(stand):
        return [state for state in states if stand in (None, "free", token_of.get(state, state))]

    found, asked = np.zeros(probability.shape), [n for n, stand in enumerate(stands) if stand is None]
    for way in itertools.product(*([None] if stand == "free" else may(stand) for stand in stands)):
        weight = 1.0
        for one, other in itertools.pairwise(way):
            if other is None or one is None:
                weight *= 1 / holding[token_of[other]] if other in token_of else 1
            else:
                weight *= step(one, other)
        tokens = [token_of.get(way[n], way[n]) for n in asked]
        for n, token in enumerate(tokens):
            weight *= probability[n, token] * (1 if token in holding else math.exp(-price))
        for n, token in enumerate(tokens):
            found[n, token] += weight
    return found / found.sum(-1, keepdims=True)


def test_a_model_that_predicts_the_next_token_in_blocks_may_copy(corpus_file):
    """Its first token is predicted before any of the canvas is shown."""
    parts = make_decoder(corpus_file, copy_penalty=3.0)
    denoiser = tiny_denoiser(shifted=True, block_size=3)
    (rollout,) = Decoder(denoiser, parts.retriever, parts.tokenizer, parts.config, "joint").decode(
        QUESTIONS[:1]
    )
    assert rollout.finished and not rollout.error


@pytest.mark.parametrize("seed", range(3))
def test_marginals_are_those_of_all_ways_to_copy(seed):
    logits = 2 * torch.randn(9, V, generator=torch.Generator().manual_seed(seed))
    first, chains = chains_of(ROWS)
    found = apply_copy_crf(torch.cat((logits, logits[:1])), chains).softmax(-1).double().numpy()
    for begin, (texts, stands, price) in zip(first, ROWS, strict=True):
        count = sum(each is None for each in stands)
        true = enumerated(logits[begin : begin + count].double().softmax(-1).numpy(), texts, stands, price)
        np.testing.assert_allclose(found[begin : begin + count], true, atol=1e-6)
    assert np.allclose(found[9], logits[0].softmax(-1)), "logits that no chain has stay as they are"


def test_what_costs_nothing_changes_nothing():
    logits = torch.randn(9, V, generator=torch.Generator().manual_seed(0))
    _, chains = chains_of([(texts, stands, 0.0) for texts, stands, _ in ROWS])
    torch.testing.assert_close(apply_copy_crf(logits, chains).softmax(-1), logits.softmax(-1))


def test_a_response_is_made_of_pieces_of_its_prompt_where_nothing_else_can_be_paid(corpus_file):
    """Of weights that were drawn by lot, left to right."""
    settings = {"commit_rule": "sequential", "early_stopping": False, "query_policy": "question"}
    decoder = make_decoder(corpus_file, copy_penalty=50.0, **settings)
    (rollout,) = decoder.decode(QUESTIONS[:1])
    tokenizer, joints = tiny_tokenizer(), SeparatorTokens(tiny_tokenizer())
    ids = [tokenizer.encode(f"{text}\n") for text in (rollout.question, *rollout.evidence_texts.values())]
    ids += joints.pieces
    pairs = {pair for piece in ids for pair in itertools.pairwise(piece)}
    written = [c.token_id for step in rollout.steps for c in step.committed]
    assert len(written) == 12 and {token for piece in ids for token in piece}.issuperset(written)
    for one, other in itertools.pairwise(written):
        assert (one, other) in pairs or joints.may_end_piece(one) != (other in joints.ids), (one, other)
    (free,) = make_decoder(corpus_file, **settings).decode(QUESTIONS[:1])
    others = [c.token_id for step in free.steps for c in step.committed]
    assert not set(itertools.pairwise(others)) <= pairs, "by themselves they write anything"


@pytest.mark.parametrize("layout", ["joint", "independent"])
def test_rows_share_nothing_but_the_call(corpus_file, layout, monkeypatch):
    """Alone, together, and with positions that are read in pieces of whole rows; one row does not copy."""
    alone = make_decoder(corpus_file, layout, batch_size=1, copy_penalty=3.0).decode(QUESTIONS)
    decoder = make_decoder(corpus_file, layout, batch_size=3, copy_penalty=3.0)
    assert rollout_records(decoder.decode(QUESTIONS)) == rollout_records(alone)
    monkeypatch.setattr(sampling, "LOGITS_CHUNK_POSITIONS", 13)
    assert rollout_records(decoder.decode(QUESTIONS)) == rollout_records(alone)
    assert rollout_records(make_decoder(corpus_file, layout).decode(QUESTIONS)) != rollout_records(alone)


def test_what_it_takes_is_what_the_budget_says():
    """At least so much, or rows would not fit; and not twice."""
    words, count = 3000, 40
    texts = [list(range(start, start + 300)) for start in range(0, 900, 300)]
    copying = CopySources.from_prompt(Prompt(tuple(texts[0]), tuple(map(tuple, texts[1:])), ()), Words())
    chain = np.array([[*range(count)], [0] * count])
    arrays = [*batch_copy_sources([copying, copying], [chain, chain], [0, count]), np.ones(2, np.float32)]
    chains, logits = CopyCRF(*map(torch.from_numpy, arrays)), torch.zeros(2 * count, words)
    with MemoryTracker() as alive:
        alive.track_tensor(logits)
        apply_copy_crf(logits, chains)
    asked, linked = estimate_crf_bytes(words, len(copying.tokens))
    said = 2 * count * (asked + linked) + 4 * logits.numel()
    assert said / 2 < alive.peak_bytes <= said
