"""The evidence layouts against one dense mask, and what is cut when it does not fit."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from dlm_rag.errors import QuestionError
from dlm_rag.evidence.encode_segments import encode_canvases
from dlm_rag.evidence.prompt_segments import ContextBudget, lay_out_prompt, truncate_evidence
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.tokenizer import Prompt
from tests.support.attention import run_with_mask
from tests.support.tiny_models import tiny_denoiser

PROMPT = Prompt(head=(1, 2, 3), facts=((10, 11), (20, 21, 22)), tail=(4, 5))
CANVAS = (256, 7, 256)
SPAN = 6
LAYOUTS = ["joint", "prefix", "independent", "parallel"]
APART = ("independent", "parallel")  # passages from position 0 each


def split_hidden(denoiser, layout, prompt=PROMPT):
    """Hidden states of the canvas, the way the decoder gets them."""
    shape = replace(denoiser.config, passage_length=SPAN)
    states = [lay_out_prompt(prompt, shape, layout).build_row(CANVAS, 0, shape.shifted)]
    return encode_canvases(denoiser, states, [range(len(CANVAS))])[0]


def masked_hidden(denoiser, layout):
    """The same from the definition of the layout: one sequence, one mask, one position list."""
    pieces = [
        ("f1", PROMPT.facts[0]),
        ("f2", PROMPT.facts[1]),
        ("q", PROMPT.head + PROMPT.tail),
        ("c", CANVAS),
    ]
    if layout not in APART:
        pieces = [("q", tuple(PROMPT.ids)), ("c", CANVAS)]
    starts = {"f1": 0, "f2": 0, "q": SPAN, "c": SPAN + 5} if layout in APART else {"q": 0, "c": 10}
    names = [name for name, ids in pieces for _ in ids]
    ids = torch.tensor([token for _, piece in pieces for token in piece])
    positions = torch.tensor([starts[name] + n for name, piece in pieces for n in range(len(piece))])
    all_seen = {"joint": names, "parallel": ["q", "c"]}.get(layout, ["c"])  # by what runs with the canvas
    allowed = torch.tensor([[query in all_seen or query == key for key in names] for query in names])
    return run_with_mask(denoiser, ids, positions, allowed)[-len(CANVAS) :]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_its_definition_as_a_mask(layout):
    denoiser = tiny_denoiser()
    with torch.no_grad():
        torch.testing.assert_close(split_hidden(denoiser, layout), masked_hidden(denoiser, layout))


def test_layouts_differ_and_passages_apart_do_not_depend_on_rank():
    denoiser, turned = tiny_denoiser(), Prompt(PROMPT.head, PROMPT.facts[::-1], PROMPT.tail)
    with torch.no_grad():
        found = {layout: split_hidden(denoiser, layout) for layout in LAYOUTS}
        for layout in APART:
            torch.testing.assert_close(split_hidden(denoiser, layout, turned), found[layout])
        assert not torch.allclose(split_hidden(denoiser, "joint", turned), found["joint"])
    assert not any(torch.allclose(found[a], found[b]) for a, b in combinations(LAYOUTS, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shifted", [False, True])
def test_segments_and_lead_hold_the_prompt_once_and_the_canvas_follows(layout, shifted):
    laid = lay_out_prompt(PROMPT, DenoiserConfig(300, shifted=shifted, passage_length=SPAN), layout)
    segments = [*laid.context_segments, laid.canvas_prefix]
    assert sorted(token for s in segments for token in s.ids) == sorted(PROMPT.ids)
    canvas_start = laid.canvas_prefix.start + len(laid.canvas_prefix.ids)
    assert canvas_start == (SPAN + 5 if layout in APART else 10)
    if layout not in ("joint", "parallel"):
        assert len(laid.canvas_prefix.ids) == shifted, (
            "the row that predicts the first canvas token runs with it"
        )


@pytest.mark.parametrize("layout", ["joint", "prefix"])
def test_passages_keep_their_tokens_in_rank_order_until_the_context_is_full(layout):
    prompt = Prompt((1,), ((2,) * 4, (3,) * 4, (4,) * 4), (5,))
    fitted = truncate_evidence(prompt, ContextBudget(layout, 14, canvas_length=6, passage_length=1))
    assert fitted.facts == ((2,) * 4, (3,) * 2, ())
    assert len(fitted) + 6 == 14, "the context is used to the last token"


def test_independent_shortens_each_passage_by_itself():
    prompt = Prompt((1,), ((2,) * 4, (3,) * 9), (5,))
    room = ContextBudget("independent", 20, canvas_length=6, passage_length=5)
    fitted = truncate_evidence(prompt, room)
    assert [len(fact) for fact in fitted.facts] == [4, 5]


def test_what_fits_is_not_touched_and_a_question_that_does_not_fit_says_by_how_much():
    assert truncate_evidence(PROMPT, ContextBudget("joint", 100, 10, 50)) == PROMPT
    with pytest.raises(QuestionError, match="2 tokens too long: the context of 10"):
        truncate_evidence(Prompt((1,) * 6, (), ()), ContextBudget("joint", 10, 6, 0))
