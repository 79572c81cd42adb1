"""The two halves of a step: denoise and commit, then search and lay out the prompt with what was found."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlm_rag.decode.rollout import Action, CommittedToken
from dlm_rag.engine.row import CanvasChange, Row, Span
from dlm_rag.engine.rules import (
    Proposals,
    RuleContext,
    choose_commits,
    compute_step_sizes,
    find_rule,
    samples_actions,
)
from dlm_rag.engine.runner import ModelRunner
from dlm_rag.evidence.prompt_segments import RowInput
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SearchResult = list[Passage] | Exception  # of one query


def take_step(model_runner: ModelRunner, tokenizer: Tokenizer, rows: list[Row]) -> None:
    """Denoises rows, each with evidence, and commits by their rules: `denoise`, then `commit` and `record`.

    A row whose proposals are wrong fails alone.
    """
    if not rows:
        return
    inputs, found = denoise(model_runner, rows)
    with profile_stage("commit"):
        for row, view, proposals in zip(rows, inputs, found, strict=True):
            if proposals is None:
                continue
            shown = replace(view, canvas=view.canvas[: row.current_block[1]].copy())
            record(row, commit(row, proposals), tokenizer.token_text)
            if row.record.action is not None:
                row.rollout.states[row.step] = shown


def denoise(model_runner: ModelRunner, rows: list[Row]) -> tuple[list[RowInput], list[Proposals | None]]:
    """Runs the model once over rows; returns what it was shown and proposes, None for a row that failed."""
    inputs = [build_model_input(row) for row in rows]
    proposed: list[Proposals | None] = [*model_runner.propose(inputs)]
    for n, (row, view) in enumerate(zip(rows, inputs, strict=True)):
        found = proposed[n]
        assert found is not None
        if not np.array_equal(found.positions, view.positions):
            row.fail("the model proposed for other positions than it was asked for")
        elif not np.isfinite(found.confidence).all():
            row.fail("the denoiser's output is not a number")
        if row.rollout.error:
            proposed[n] = None
    return inputs, proposed


def build_model_input(row: Row) -> RowInput:
    """Returns what the model is shown of a row and asked about; draws the numbers that sampling takes.

    Asked about are the masked positions that are shown, and with edits the committed ones of the block;
    where none is shown, the next one.
    """
    settings, canvas, (begin, end) = row.settings, row.canvas, row.shown_span
    asked = canvas.masked[begin : max(end, begin + 1)].copy()
    if canvas.frozen_length is not None and begin < end:
        asked[: row.current_block[1] - begin] = True
    positions = begin + np.flatnonzero(asked)
    if settings.mode == "autoregressive" and row.laid_out_prompt.unseen_segments:
        begin -= 1  # the last token alone sees the evidence
    statistics = find_rule(settings.commit_rule).statistics if settings.commit_rule else ()
    draws, temperature = canvas.draw_numbers(settings, row.generator)
    row.draws = draws if samples_actions(settings) else None
    quantiles, soft = None, None
    if draws is not None and "actions" in statistics:
        soft = (settings.temperature or 1.0, settings.commit_threshold, settings.gate_temperature)
        quantiles, temperature = draws[:2, positions], 0.0
    elif draws is not None and temperature:
        quantiles = draws[0, positions]
    return RowInput(
        row=row.ticket,
        laid_out_prompt=row.laid_out_prompt,
        canvas=canvas.model_ids[:end],
        positions=positions,
        finished_length=begin,
        temperature=temperature,
        quantiles=quantiles,
        soft_threshold=soft,
        needs_entropy="spread" in statistics,
    )


def commit(row: Row, proposals: Proposals) -> CanvasChange:
    """Writes on the canvas what the row's rule takes of the proposals, and what they edit."""
    canvas, (begin, end) = row.canvas, row.current_block
    shown = row.shown_span
    chosen = None if canvas.chooses_itself else _choose(row, proposals)
    change = canvas.write(proposals, chosen, row.settings, (begin, end))
    # Where only what is next was asked for, the older guesses say more: of what comes after it.
    if row.provisional is None or shown[0] < shown[1]:
        row.provisional = canvas.select_provisional(proposals)
    else:
        row.provisional = row.provisional.subset(canvas.masked[row.provisional.positions])
    row.blocks_just_finished = (row.current_block[0] - begin) // (end - begin)
    return change


def _choose(row: Row, proposals: Proposals) -> Proposals | None:
    """The proposals to commit in the open blocks; None where these have no mask."""
    canvas, settings, blocks, chosen = row.canvas, row.settings, row.open_blocks, list[Proposals]()
    for n, block in enumerate(blocks):
        begin, end = find_commit_span(canvas.masked, block, settings.block_length)
        at = proposals.positions
        candidates = proposals.subset(canvas.masked[at] & (at >= begin) & (at < end))
        must = not n or canvas.committed_share(*blocks[n - 1]) >= settings.semi_complete_threshold
        if len(candidates.positions):
            chosen.append(_choose_in_span(row, candidates, (begin, end), must))
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    written = np.concatenate([each.positions for each in chosen])
    return proposals.subset(np.isin(proposals.positions, written))


def find_commit_span(masked: NDArray[np.bool_], block: Span, block_length: int | None) -> Span:
    """Returns from where and up to where positions of a block of attention may be committed.

    That is its first part of `block_length` (None or 0: the block) with a mask. Parts are counted from
    where the block begins, which may be below 0.
    """
    begin, end = block
    if block_length:
        first = max(begin, 0) + int(np.argmax(masked[max(begin, 0) : end]))
        begin = first - (first - begin) % block_length
        end = min(begin + block_length, end)
    return begin, end


def _choose_in_span(row: Row, candidates: Proposals, span: Span, must: bool) -> Proposals:
    """The candidates, of at least one, that the rule commits; must: whether it has to commit any."""
    settings, least = row.settings, int(must)
    if settings.mode == "autoregressive":  # the one token that was asked for
        return candidates
    if must and settings.steps_per_block is not None:
        sizes = compute_step_sizes(span[1] - span[0], settings.steps_per_block, settings.schedule)
        least = sizes[min(row.rollout.count_steps_within(*span), len(sizes) - 1)]
    chosen, sampled = choose_commits(candidates, RuleContext(settings, least, row.draws))
    if sampled is not None:
        positions = tuple(candidates.positions.tolist())
        row.record.action = Action(positions, sampled.forced, sampled.log_prob)
    return chosen


def record(row: Row, change: CanvasChange, text: Callable[[int], str]) -> None:
    """Notes in the record of the step what was written, and how sure the model is of what is not."""
    step, masked = row.record, row.canvas.masked
    step.committed, step.edited = _name_tokens(change.committed, text), _name_tokens(change.edited, text)
    step.remasked = change.remasked
    assert row.provisional is not None
    still = row.provisional.subset(masked[row.provisional.positions])
    sure = change.committed if row.settings.mode == "autoregressive" else still
    unseen = 0.0 if masked.any() else None  # nothing is known of what is after the window
    row.lowest_confidence = float(sure.confidence.min()) if sure and len(sure.positions) else unseen
    if row.recorder is not None:
        arrays = (still.token_ids.tolist(), still.confidence.tolist())
        guessed = zip(*arrays, strict=True)
        step.guesses = row.recorder.record_step(dict(zip(still.positions.tolist(), guessed, strict=True)))


def _name_tokens(written: Proposals | None, text: Callable[[int], str]) -> tuple[CommittedToken, ...]:
    """Proposals as a step records them."""
    if written is None:
        return ()
    arrays = (written.positions, written.token_ids, written.confidence, written.log_prob)
    rows = zip(*(array.tolist() for array in arrays), strict=True)
    return tuple(CommittedToken(position, token, text(token), *sure) for position, token, *sure in rows)
