"""The first half of a step: one pass of the model over all rows, and what each of them commits."""

from functools import partial

import numpy as np

from dlm_rag.decode.citations import find_grounded_tokens
from dlm_rag.decode.model_runner import ModelInput, ModelRunner
from dlm_rag.decode.policy_sampling import ask_commit_head
from dlm_rag.decode.rollout import Action, CommittedToken
from dlm_rag.decode.row import Row
from dlm_rag.diffusion.commit_rules import (
    Proposals,
    RuleContext,
    choose_commits,
    compute_step_sizes,
    find_rule,
    samples_actions,
)
from dlm_rag.model.policy_heads import PolicyHeads
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.text import split_words
from dlm_rag.tokenizer import Tokenizer


class DenoiseStep:
    """Denoises rows and commits by their rules; heads: of the rule `policy_head`."""

    def __init__(self, model_runner: ModelRunner, tokenizer: Tokenizer, heads: PolicyHeads | None) -> None:
        self.model_runner, self.tokenizer, self.heads = model_runner, tokenizer, heads

    def run(self, rows: list[Row]) -> None:
        """One step of these rows, each with evidence; a row whose proposals are wrong fails alone."""
        if not rows:
            return
        views = [build_model_input(row) for row in rows]
        found = self.model_runner.propose(views)
        with profile_stage("commit"):
            for row, view, proposals in zip(rows, views, found, strict=True):
                if not np.array_equal(proposals.positions, view.positions):
                    row.fail("the model proposed for other positions than it was asked for")
                elif not np.isfinite(proposals.confidence).all():
                    row.fail("the denoiser's output is not a number")
                else:
                    self._write(row, proposals)

    def _write(self, row: Row, proposals: Proposals) -> None:
        canvas, record, settings = row.canvas, row.record, row.settings
        # Where one token is asked for alone, the older provisional ones say more: of what comes after it.
        if row.provisional is None or not row.follows_last_block:
            masked = canvas.masked[proposals.positions]
            row.provisional = proposals.most_probable or proposals.subset(masked)
        change = canvas.write_step(proposals, settings, row.current_block, partial(self._choose, row))
        record.committed, record.edited = self._records(change.committed), self._records(change.edited)
        record.remasked = change.remasked
        still = row.provisional.subset(canvas.masked[row.provisional.positions])
        unseen = 0.0 if canvas.masked.any() else None  # nothing is known of what is after the window
        row.lowest_confidence = float(still.confidence.min()) if len(still.positions) else unseen
        if row.recorder is not None:
            record.guesses = row.recorder.record_step(still)

    def _choose(self, row: Row, candidates: Proposals, span: tuple[int, int] | None) -> Proposals:
        """What the commit rule of the row commits of at least one candidate."""
        settings, least = row.settings, 1
        if settings.steps_per_block is not None and span is not None:
            sizes = compute_step_sizes(span[1] - span[0], settings.steps_per_block, settings.schedule)
            least = sizes[min(row.rollout.count_steps_within(*span), len(sizes) - 1)]
        grounded = partial(self._grounded_mask, row)
        head = None if self.heads is None else partial(ask_commit_head, row=row, heads=self.heads)
        context = RuleContext(settings, least, row.record.draws, grounded, head)
        chosen, sampled = choose_commits(candidates, context)
        if sampled is not None:
            features = () if sampled.features is None else tuple(map(tuple, sampled.features.tolist()))
            positions = tuple(candidates.positions.tolist())
            row.record.action = Action(positions, sampled.forced, sampled.log_prob, features)
        return chosen

    def _records(self, written: Proposals | None) -> tuple[CommittedToken, ...]:
        if written is None:
            return ()
        columns = (written.positions, written.token_ids, written.confidence, written.log_prob)
        return tuple(
            CommittedToken(position, token, self.tokenizer.token_text(token), confidence, log_prob)
            for position, token, confidence, log_prob in zip(*(c.tolist() for c in columns), strict=True)
        )

    def _grounded_mask(self, row: Row, candidates: Proposals) -> list[bool]:
        """Whether question or evidence hold the words that each candidate would write."""
        assert row.provisional is not None
        if row.known_words is None:
            texts = (row.question.question, *row.evidence.values())
            row.known_words = frozenset(split_words("\n".join(texts)))
        text, spans = self.tokenizer.decode_with_offsets(row.canvas.fill_provisional(row.provisional, 0.0))
        held = find_grounded_tokens(text, spans, row.known_words)
        return [held[position] for position in candidates.positions]


def build_model_input(row: Row) -> ModelInput:
    """What the model is shown of a row; draws the numbers that its sampling takes."""
    assert row.laid_out_prompt is not None and row.settings.commit_rule is not None
    settings, positions, (begin, end) = row.settings, row.positions_to_predict, row.window
    statistics = find_rule(settings.commit_rule).statistics
    draws, temperature = row.canvas.draw_numbers(settings, row.generator)
    row.record.draws = draws if samples_actions(settings) else None
    soft = (settings.temperature or 1.0, settings.commit_threshold, settings.gate_temperature)
    policy_draws = "actions" in statistics and draws is not None
    return ModelInput(
        slot=row.slot,
        laid_out_prompt=row.laid_out_prompt,
        canvas=row.canvas.model_ids[:end],
        positions=positions,
        finished_length=begin,
        temperature=0.0 if policy_draws else temperature,
        quantiles=draws[0, positions] if draws is not None and temperature and not policy_draws else None,
        needs_entropy="spread" in statistics,
        soft_threshold=soft if policy_draws else None,
        policy_quantiles=draws[:2, positions] if draws is not None and policy_draws else None,
        copy_sources=row.copy_sources,
        copy_penalty=settings.copy_penalty or 0.0,
    )
