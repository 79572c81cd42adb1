"""The canvas of a model that deletes and inserts: its rule on plain lists, and what replays say."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.levenshtein import LevenshteinCanvas
from dlm_rag.decode.resolve_settings import resolve_settings
from dlm_rag.decode.rollout import CommittedToken, RolloutStep
from dlm_rag.decode.row import make_canvas
from dlm_rag.diffusion.commit_rules import Proposals, select_by_threshold
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser_config import DenoiserConfig

DELETE, SPLIT, TEXT, MASK = 0, 1, range(2, 40), 99
LENGTH, BLOCKS = 12, ((-2, 4), (4, 10), (10, 12))


class Block:
    """What SGLang's `JointThresholdInDel` does with a block, on lists.

    ranked: for each position tokens and probabilities, the most probable one first.
    """

    def __init__(self, size, size_with_prompt):
        self.tokens, self.original = [MASK] * size, [True] * size
        self.size, self.whole = size, size_with_prompt
        self.steps = self.edits = 0
        self.seen, self.tried, self.over = [], [set() for _ in range(size)], False

    def step(self, ranked, threshold, edit_threshold, most):
        left = [t == MASK and o for t, o in zip(self.tokens, self.original, strict=True)]
        introduced = self.tokens.count(MASK) - sum(left)
        self.steps, self.edits = self.steps + 1, self.edits + (not any(left))
        last = self.edits >= most or self.steps > self.whole + most
        best = [row[0] for row in ranked]
        masks = [n for n, t in enumerate(self.tokens) if t == MASK]
        chosen = masks
        if any(left) and not last:
            sure = [n for n in masks if best[n][1] >= threshold]
            by_rank = sorted(masks, key=lambda n: -best[n][1])[: 1 + introduced]
            chosen = sure if len(sure) > introduced else sorted(by_rank)
        changed = [
            n for n, t in enumerate(self.tokens)
            if n in chosen or (t != MASK and best[n][0] != t and best[n][1] >= edit_threshold)
        ]  # fmt: skip
        if not changed:
            self.over = True
            return
        new = {n: best[n][0] for n in changed}
        if last:
            texts = {n: [t for t, _ in ranked[n] if t in TEXT] for n in changed}
            new = {n: t if t in TEXT else texts[n][0] for n, t in new.items()}
        elif self.tokens in self.seen:
            n = min(changed, key=lambda n: best[n][1])
            new[n] = next(t for t, _ in ranked[n] if t not in self.tried[n])
        self.seen.append(list(self.tokens))
        for n, token in new.items():
            self.tried[n].add(token)
        tokens, original = [], []
        for n, old in enumerate(self.tokens):
            token = new.get(n, old)
            if token == SPLIT:
                tokens, original = [*tokens, MASK, old], [*original, False, self.original[n]]
            elif token != DELETE:
                tokens, original = [*tokens, token], [*original, self.original[n]]
        self.tokens = (tokens + [MASK] * self.size)[: self.size]
        self.original = (original + [False] * self.size)[: self.size]
        self.over = last


def rank_tokens(draw):
    """For a position all tokens by falling probability, none of a tie."""
    tokens = [*draw.sample((DELETE, SPLIT, *TEXT[:3]), 5), *TEXT[3:]]
    shares = sorted((draw.random() ** 9 for _ in tokens), reverse=True)
    return [(token, share / sum(shares)) for token, share in zip(tokens, shares, strict=True)]


def propose(positions, excluded, ranked):
    """Of each position the most probable token that is not excluded."""
    best = [next(x for x in ranked[n] if x[0] not in excluded.get(n, ())) for n in positions]
    ids, confidence = np.array([t for t, _ in best], np.int64), np.array([p for _, p in best])
    return Proposals(np.array(positions, np.int64), ids, *[confidence] * 5)


@pytest.mark.parametrize("seed", range(60))
def test_steps_are_those_of_the_rule_on_lists_and_a_replay_gives_them_again(seed):
    draw = random.Random(seed)
    threshold, bound, most = (
        draw.choice((0.3, 0.5, 0.9)),
        draw.choice((0.0, 0.3, 0.5)),
        draw.choice((1, 3, 6)),
    )
    settings = DecodeConfig(commit_threshold=threshold, edit_threshold=bound, max_edit_steps=most)
    canvas = LevenshteinCanvas(LENGTH, MASK, 0, edit_ids=(DELETE, SPLIT))
    replayed, marks = {}, {}

    def choose(candidates, span, must):
        least = 1 + canvas.introduced_masks
        return candidates.subset(select_by_threshold(candidates.confidence, threshold, least))

    number, moved = 0, 0
    for begin, end in BLOCKS:
        start = max(0, begin)
        block = Block(end - start, end - begin)
        few = [rank_tokens(draw) for _ in range(LENGTH)]  # the same again and again: blocks repeat
        while not block.over:
            ranked = few if draw.random() < 0.7 else [rank_tokens(draw) for _ in range(LENGTH)]
            places, again = list(range(start, end)), canvas.second_choices(settings, (begin, end))
            found = propose(places, {}, ranked)
            if again:
                assert [*again] == places
                found = Proposals(**vars(found) | {"second_choice": propose(places, again, ranked)})
            before = canvas.ids.tolist()
            change = canvas.write_step(found, settings, [(begin, end)], choose)
            block.step(ranked[start:end], threshold, bound, most)
            assert canvas.ids[start:end].tolist() == block.tokens
            assert (
                canvas.ids[:start].tolist() == before[:start] and canvas.ids[end:].tolist() == before[end:]
            )
            assert canvas.masked.tolist() == [token == MASK for token in canvas.ids.tolist()]
            assert (canvas.frozen_length == end) == block.over
            number += 1
            parts = [
                tuple(
                    CommittedToken(n, t, str(t), 1.0)
                    for n, t in zip(p.positions.tolist(), p.token_ids.tolist(), strict=True)
                )
                if p is not None else ()
                for p in (change.committed, change.edited)
            ]  # fmt: skip
            step = RolloutStep(
                number,
                None,
                (),
                False,
                parts[0],
                edited=parts[1],
                deleted=change.deleted,
                inserted=change.inserted,
            )
            replayed = step.write_tokens(replayed)
            marks = step.apply(marks, {token.position: number for token in step.written_tokens})
            shown = [replayed[n].token_id if n in replayed else MASK for n in range(LENGTH)]
            assert shown == canvas.ids.tolist() and marks.keys() == replayed.keys()
            assert len(step.deleted) == len(step.inserted)
            assert all(start <= n < end for n in (*step.deleted, *step.inserted))
            moved += len(step.deleted)
    assert canvas.is_finished(()) and not {DELETE, SPLIT, MASK} & {*canvas.ids.tolist()}
    assert moved


def test_what_moves_keeps_the_step_that_wrote_it():
    first = RolloutStep(1, None, (), False, tuple(CommittedToken(n, n, "abcd"[n], 1.0) for n in range(4)))
    second = RolloutStep(2, None, (), False, deleted=(0, 3), inserted=(1, 3))
    marks = first.apply({}, {token.position: 1 for token in first.committed})
    written = {5: 2} | {token.position: 2 for token in second.committed}
    assert second.apply(marks, written) == {0: 1, 2: 1, 5: 2}
    assert [second.move_position(n) for n in range(5)] == [None, 0, 2, None, 4]
    tokens = second.write_tokens(first.write_tokens({}))
    assert {n: token.token for n, token in tokens.items()} == {0: "b", 2: "c"}


SHAPE = DenoiserConfig(vocab_size=100, block_size=4, delete_token_id=DELETE, split_token_id=SPLIT)


@pytest.mark.parametrize(
    "words",
    [
        {"temperature": 0.5}, {"copy_penalty": 1.0}, {"commit_rule": "sampled", "temperature": 1.0},
        {"tokens_per_step": 2},
        {"block_length": 2}, {"max_edit_steps": 0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_do_not_go_with_deletions_are_refused(words):
    """Sampled commits among them, and so reinforcement learning, whose steps are these."""
    resolve_settings(DecodeConfig(edit_threshold=0.5), SHAPE)
    with pytest.raises(ConfigError, match=f"{next(iter(words))}=.* does not go with edit_threshold"):
        resolve_settings(DecodeConfig(edit_threshold=0.5, **words), SHAPE)
    if words != {"max_edit_steps": 0}:
        resolve_settings(DecodeConfig(**words), SHAPE)


def test_without_an_edit_threshold_no_token_that_edits_is_proposed():
    tokenizer = SimpleNamespace(mask_id=MASK, end_ids=frozenset())
    plain, edited = (
        make_canvas(resolve_settings(DecodeConfig(edit_threshold=bound), SHAPE), SHAPE, tokenizer, None)
        for bound in (None, 0.5)
    )
    assert not isinstance(plain, LevenshteinCanvas) and plain.excluded_ids == (DELETE, SPLIT)
    assert isinstance(edited, LevenshteinCanvas) and not edited.excluded_ids
