"""Block denoisers, and the definition of what they compute."""

import random

import numpy as np
import torch

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.engine.engine import Decoder
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.packed_batch import RowInput
from dlm_rag.retrieval import load_retriever
from dlm_rag.tokenizer import Prompt
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.attention import run_with_mask
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

MASK, LENGTH, BLOCK = 256, 16, 4


FACTS = ((10, 11), (20, 21, 22), (30,), (40, 41, 42, 43, 44))


def block_denoiser(**shape) -> Denoiser:
    return tiny_denoiser(**({"block_size": BLOCK, "passage_length": 6} | shape))


def dense_reference_states(denoiser, view):
    """The states that predict the positions of a view: one sequence, one mask, one list of positions.

    A token of the chain of lead and canvas sees the chain up to the end of its block, all segments in
    front, and those after the finished blocks that stand before it; a segment sees itself. With causal
    context, a segment and the chain up to the current block are causal.
    """
    laid = view.laid_out_prompt
    chain = laid.build_canvas_segment(view.canvas.tolist(), view.finished_length)
    finished = chain.block_start(len(laid.canvas_prefix.ids) + view.finished_length)
    causal = denoiser.config.causal_context
    front = len(laid.context_segments) - laid.unseen_segments
    segments = [(finished * (n >= front), s) for n, s in enumerate(laid.context_segments)]
    names = [(n, at) for n, (at, s) in enumerate(segments) for _ in s.ids]
    ids = [token for _, s in segments for token in s.ids]
    positions = [s.start + n for _, s in segments for n in range(len(s.ids))]
    ends = np.searchsorted(chain.block_ends, np.arange(len(chain.ids)), "right")
    if causal:
        ends = np.array(
            [n if n < finished else finished + (n - finished) // BLOCK for n in range(len(ends))]
        )
    allowed = [
        [names[n] == names[m] and (not causal or m <= n) for m in range(len(ids))]
        + [False] * len(chain.ids)
        for n in range(len(ids))
    ]
    for n, own in enumerate(ends):
        seen = [n >= at for _, at in names]
        allowed.append([*seen, *(other <= own for other in ends)])
    hidden = run_with_mask(
        denoiser,
        torch.tensor([*ids, *chain.ids]),
        torch.tensor([*positions, *range(chain.start, chain.start + len(chain.ids))]),
        torch.tensor(allowed),
    )
    ahead = denoiser.config.shifted or view.positions[0] == len(view.canvas)
    first = len(ids) + len(laid.canvas_prefix.ids) - ahead
    return hidden[first + view.positions]


def top_confidences(denoiser, hidden):
    """Of the most probable token that is not the mask, and which it is."""
    with torch.no_grad():
        probability = denoiser.compute_token_logits(hidden).softmax(-1)
    probability[:, MASK] = -1
    return probability.max(-1)


def walk_decode_views(shape, order, seed):
    """Views of a row as decoding makes them: evidence changes now and then, blocks are finished."""
    rng, canvas = random.Random(seed), np.full(LENGTH, MASK)
    laid, finished, facts = None, 0, ()
    while finished < LENGTH:
        facts = tuple(rng.sample(FACTS, rng.randrange(4))) if laid is None or rng.random() < 0.6 else facts
        laid = lay_out_prompt(Prompt((1, 2, 3), facts, (4,)), shape, finished_block_context=order)
        begin, end = laid.block_bounds(finished)
        begin, end = max(0, begin), min(end, LENGTH)
        if shape.causal_context and canvas[begin] == MASK:
            yield RowInput(1, laid, canvas[:begin].copy(), np.array([begin]), finished_length=begin)
            canvas[begin] = 60 + begin
        masked = begin + np.flatnonzero(canvas[begin:end] == MASK)
        looks = min(LENGTH, end + rng.choice((0, BLOCK, 2 * BLOCK)))
        asked = np.flatnonzero(canvas[:looks] == MASK)
        yield RowInput(1, laid, canvas[:looks].copy(), asked[asked >= begin], finished_length=begin)
        for place in masked[: rng.randint(1, len(masked))]:
            canvas[place] = 60 + place
        finished = int(np.argmax(canvas == MASK)) if (canvas == MASK).any() else LENGTH


def make_decoder(corpus_file, layout="independent", prefix_cache_gib=1.0, shape=None, **settings):
    template = PromptTemplate.from_checkpoint(None, layout)
    tokenizer = tiny_tokenizer(PromptTemplate(head="{question}\n", fact=template.fact))
    denoiser = block_denoiser(**({"passage_length": 96} | (shape or {})))
    config = DecodeConfig(**({"max_new_tokens": LENGTH, "commit_threshold": 0.4} | settings))
    engine = EngineConfig(prefix_cache_gib=prefix_cache_gib)
    return Decoder(denoiser, load_retriever(corpus_file, top_k=2), tokenizer, config, layout, engine)
