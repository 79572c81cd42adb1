"""Attention in blocks with retrieval inside: edits, given tokens, whole last blocks, and their traces."""

from dataclasses import replace

import pytest

from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.trace_file import read_trace, read_trace_header
from dlm_rag.engine import engine
from dlm_rag.engine.engine import Decoder, resolve_settings
from dlm_rag.engine.rules import select_by_threshold
from dlm_rag.engine.step import build_row_input
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import ExpertsConfig
from dlm_rag.questions import Question
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support import traces
from tests.support.block_attention import BLOCK, LENGTH, block_denoiser
from tests.support.decoding import bias_end_token
from tests.support.tiny_models import byte_tokenizer, tiny_tokenizer

ASKED = [
    Question(f"{n}", text) for n, text in enumerate(("who", "what is it", "where was this", "why not?"))
]
EDITS = {"edit_threshold": 0.1, "max_edit_steps": 3}
SHIFTED = {"shifted": True, "block_grid": "prompt"}
ROUTED = ExpertsConfig(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, expert_capacity=3, expert_bias=True
)
AT_ONCE = {"blocks_at_once": 3}


def make_decoder(corpus, layout="joint", prefix_cache_gib=1.0, shape=None, **settings):
    """Attention in blocks of 4, other evidence at every search."""
    template = PromptTemplate(head="{question}\n", fact=PromptTemplate.from_checkpoint(None, layout).fact)
    shape = {"passage_length": 96, "block_grid": "prompt"} | (shape or {})
    threshold = {} if settings.get("commit_rule") in ("top_k", "sequential") else {"commit_threshold": 0.4}
    config = DecodeConfig(**({"max_new_tokens": LENGTH} | threshold | settings))
    engine = EngineConfig(prefix_cache_gib=prefix_cache_gib)
    parts = block_denoiser(**shape), traces.RotatingRetriever(corpus, 2), tiny_tokenizer(template)
    return Decoder(*parts, config, layout, engine)


def what_happened(rollout):
    """What each step asked, found and wrote."""
    return [
        (s.query, s.passage_ids, s.remasked, *([(t.position, t.token_id) for t in part] for part in parts))
        for s in rollout.steps
        if (parts := (s.committed, s.edited))
    ]


def written_ahead(steps):
    """Whether a position was committed before another one, a block and more in front of it."""
    written = [position for *_, committed, _ in steps for position, _ in committed]
    return any(later - BLOCK >= earlier for n, later in enumerate(written) for earlier in written[n:])


@pytest.mark.parametrize(
    ("layout", "shape", "settings"),
    [
        ("joint", {}, EDITS),
        ("joint", {"block_grid": "canvas"}, EDITS),
        ("independent", {}, EDITS | {"finished_block_context": "no_evidence"}),
        ("joint", SHIFTED, EDITS),
        ("independent", SHIFTED, {}),
        ("joint", {}, {"steps_per_block": 2, "commit_rule": "top_k"}),
        ("joint", {"experts": ROUTED, "excluded_token_ids": (115, 153)}, EDITS),
        ("joint", {}, AT_ONCE),
        ("joint", {"block_grid": "canvas"}, AT_ONCE),
        ("independent", {}, AT_ONCE | {"semi_complete_threshold": 0.5}),
        ("independent", {}, AT_ONCE | {"finished_block_context": "no_evidence", "temperature": 1.0}),
    ],
    ids=str,
)
def test_the_same_tokens_alone_and_in_a_batch_with_and_without_a_pool(corpus, layout, shape, settings):
    found = []
    for ways in ({"batch_size": 1}, {"batch_size": 4, "prefix_cache_gib": 0}, {"overlap": "pipeline"}):
        rollouts = make_decoder(corpus, layout, shape=shape, **settings, **ways).decode(ASKED)
        assert not any(rollout.error for rollout in rollouts)
        found.append([what_happened(rollout) for rollout in rollouts])
    assert found[1] == found[0] and found[2] == found[0]
    if "edit_threshold" in settings:
        assert any(edited for rollout in found[0] for *_, edited in rollout)
    written = {token for rollout in found[0] for *_, a, b in rollout for _, token in (*a, *b)}
    assert not written & {*shape.get("excluded_token_ids", ())}
    if "blocks_at_once" in settings:
        assert any(written_ahead(rollout) for rollout in found[0])


@pytest.mark.parametrize("more", [{}, {"block_grid": "canvas", "causal_context": True}], ids=str)
def test_a_block_that_is_shown_with_its_first_token_masked_has_the_same_one(corpus, more):
    """A rule that names no order sees it only once that token is known."""
    found = []
    for rule in ({"commit_rule": "sequential"}, {"commit_rule": "left_to_right"}):
        settings = rule | {"query_policy": "question", "early_stopping": False}
        decoder = make_decoder(corpus, shape=SHIFTED | more, **settings)
        found.append([what_happened(r) for r in decoder.decode(ASKED, tokens_per_step=1)])
    assert found[0] == found[1]
    quick = decoder.decode(ASKED, tokens_per_step=None, commit_threshold=0)
    assert any(len(rollout.steps[1].committed) > 1 for rollout in quick)


@pytest.mark.parametrize(("threshold", "rounds_needed"), [(0.1, {3}), (0.6, {2, 3})])
def test_only_the_block_under_work_is_edited_until_nothing_changes(corpus, threshold, rounds_needed):
    settings = EDITS | {"edit_threshold": threshold, "early_stopping": False, "query_policy": "question"}
    decoder = make_decoder(corpus, "independent", **settings)
    rounds = set()
    for rollout in decoder.decode(ASKED):
        under_work, full = 0, 0
        for step in rollout.steps[1:]:
            (block,) = {token.position // BLOCK for token in step.written_tokens} or {under_work}
            assert block in (under_work, under_work + 1), "never back to one that is finished"
            if block > under_work:
                rounds.add(full)
            full = full + 1 if not step.committed and block == under_work else 0
            under_work = block
        rounds.add(full)
        assert under_work == LENGTH // BLOCK - 1 and rollout.tokens_committed == LENGTH
    assert rounds == rounds_needed


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_text_that_may_still_be_edited_is_not_at_its_end(corpus, rounds):
    texts = []
    for early in (True, False):
        decoder = make_decoder(
            corpus, edit_threshold=0.1, max_edit_steps=rounds, early_stopping=early, query_policy="question"
        )
        texts.append(bias_end_token(decoder, 6.0).decode(ASKED))
    for short, long in zip(*texts, strict=True):
        assert short.response == long.response
        assert what_happened(short) == what_happened(long)[: len(short.steps)]
    assert sum(r.forwards for r in texts[0]) < sum(r.forwards for r in texts[1])


def commit_sure(candidates, context):
    """As `threshold`: none of a block that may wait."""
    return select_by_threshold(candidates.confidence, context.settings.commit_threshold, context.least)


def test_a_rule_of_ones_own_may_leave_a_block_that_may_wait(corpus):
    way = AT_ONCE | {"max_new_tokens": 13}
    own = make_decoder(corpus, commit_rule=f"{__name__}:commit_sure", **way).decode(ASKED)
    assert [*map(what_happened, own)] == [*map(what_happened, make_decoder(corpus, **way).decode(ASKED))]


@pytest.mark.parametrize("settings", [EDITS, AT_ONCE, {}], ids=["edits", "blocks at once", "none"])
@pytest.mark.parametrize("context", [95, 512])
def test_a_trace_gives_prompts_canvases_and_edits_again(corpus, tmp_path, settings, context):
    """Also where the last block made whole is what leaves the evidence no room."""
    decoder = make_decoder(
        corpus, shape={"max_position_embeddings": context}, max_new_tokens=13, **settings
    )
    rollouts, seen = traces.decode_and_spy(decoder, ASKED)
    path = traces.write_rollouts(tmp_path / "t.jsonl", traces.make_trace_header(decoder), rollouts)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    header = read_trace_header(path)
    tokenizer, made = traces.rebuild_tokenizer(header, tmp_path / "tokenizer"), {}
    for rollout, again in zip(rollouts, read_trace(path), strict=True):
        assert what_happened(again) == what_happened(rollout)
        assert bool(rollout.cut) == (context == 95)
        made |= traces.rebuild_inputs(again, header, tokenizer)
    assert made == seen


def test_a_token_that_follows_from_the_block_before_is_asked_for_alone(corpus, monkeypatch):
    """And leaves the query the guesses that are behind it."""
    decoder = make_decoder(corpus, "independent", shape=SHIFTED, max_new_tokens=24, early_stopping=False)
    launch, finish, given = engine.launch_step, engine.finish_step, []

    def check_input(runner, rows):
        firsts = [(row, row.canvas.first_masked) for row in rows]
        now = [(row, n) for row, n in firsts if n and row.laid_out_prompt.block_bounds(n)[0] == n]
        for row, first in now:
            assert row.find_view().shown == (first, first)
            assert build_row_input(row).positions.tolist() == [first]
        given.append(now)
        return launch(runner, rows)

    def check_commits(launched, tokenizer):
        finish(launched, tokenizer)
        for row, first in given[-1]:
            assert [token.position for token in row.record.committed] == [first]
            assert len(row.provisional.positions) > BLOCK or first > 24 - 2 * BLOCK

    monkeypatch.setattr(engine, "launch_step", check_input)
    monkeypatch.setattr(engine, "finish_step", check_commits)
    decoder.decode(ASKED)
    assert sum(map(len, given)) == len(ASKED) * 24 // BLOCK


def decode_committed(corpus, layout="independent", **settings):
    """By question, of each step what it committed; the same passages throughout."""
    settings = {"early_stopping": False, "query_policy": "question", "max_new_tokens": 24} | settings
    rollouts = make_decoder(corpus, layout, **settings).decode(ASKED)
    return [[[t.position for t in s.committed] for s in rollout.steps[1:]] for rollout in rollouts]


@pytest.mark.parametrize("schedule", ["even", "rounded"])
def test_no_block_takes_more_steps_than_its_schedule_has(corpus, schedule):
    ahead = {"blocks_at_once": 2, "block_add_threshold": 0.25, "semi_complete_threshold": 0.25}
    own = {"steps_per_block": 3, "commit_threshold": 1.0, "schedule": schedule} | ahead
    for steps in decode_committed(corpus, shape={"block_grid": "canvas"}, **own):
        took = [{position // BLOCK for position in committed} for committed in steps]
        assert all(sum(block in blocks for blocks in took) <= 3 for block in range(24 // BLOCK))
        assert any(len(blocks) > 1 for blocks in took)


def test_blocks_join_and_wait_as_their_thresholds_say(corpus):
    """From what each step has committed: which blocks were open, and which of them had to commit."""
    n, joins, forces, waited, forced = 3, 0.5, 0.75, 0, 0
    thresholds = {"block_add_threshold": joins, "semi_complete_threshold": forces, "commit_threshold": 0.35}
    for steps in decode_committed(corpus, shape={"block_grid": "canvas"}, blocks_at_once=n, **thresholds):
        left, finished_before = [BLOCK] * (24 // BLOCK), 0
        for committed in steps:
            first = next(block for block, masks in enumerate(left) if masks)
            open_blocks = [first]
            while (
                open_blocks[-1] + 1 < min(len(left), max(first + 1, finished_before + n))
                and 1 - left[open_blocks[-1]] / BLOCK >= joins
            ):
                open_blocks.append(open_blocks[-1] + 1)
            written = {position // BLOCK for position in committed}
            assert written <= {*open_blocks}
            for block in open_blocks:
                must = block == first or 1 - left[block - 1] / BLOCK >= forces
                assert block in written or not must or not left[block]
                waited += not must and block not in written
                forced += must and block != first and block in written
            finished_before = first
            for position in committed:
                left[position // BLOCK] -= 1
        assert not any(left)
    assert waited and forced


@pytest.mark.parametrize(
    ("shape", "settings", "error"),
    [
        ({"block_size": None}, {}, "blocks_at_once=2 has no effect on a model whose attention"),
        (SHIFTED, {}, "blocks_at_once=2: a finished block predicts"),
        ({}, {"commit_rule": "sampled"}, "blocks_at_once=2 has no effect with decode.commit_rule=sampled"),
        ({}, {"edit_threshold": 0.5}, "edits one block at a time"),
        ({}, {"tokens_per_step": 1}, "tokens_per_step counts in one block"),
    ],
)
def test_where_blocks_are_written_one_by_one_several_are_refused(corpus, shape, settings, error):
    with pytest.raises(ConfigError, match=error):
        make_decoder(corpus, shape=shape, blocks_at_once=2, **settings)


@pytest.mark.parametrize(
    "own", [{"blocks_at_once": 2, "block_add_threshold": 0.5}, {"tokens_per_step": 1}], ids=str
)
def test_those_of_a_checkpoint_give_way_to_a_number_of_tokens_and_it_to_them(own):
    shape = replace(block_denoiser().config, decode_settings=own)
    for given in ({"blocks_at_once": 3}, {"tokens_per_step": 2}):
        found = resolve_settings(DecodeConfig(**given), shape)
        both = found.blocks_at_once, found.tokens_per_step
        assert both == (given.get("blocks_at_once", 1), given.get("tokens_per_step"))
        trained = shape.add_settings(given).decode_settings
        assert resolve_settings(DecodeConfig(), replace(shape, decode_settings=trained)) is not None
    one = resolve_settings(DecodeConfig(blocks_at_once=1), shape)
    assert one.tokens_per_step == own.get("tokens_per_step"), "1 rules nothing out"
