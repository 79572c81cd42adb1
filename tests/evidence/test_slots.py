"""What rows see between steps: moves within a slot."""

import random

import torch

from dlm_rag.model.kv_store import SlotKVCache


def test_moves_are_as_if_at_once():
    rng = random.Random(0)
    for _ in range(300):
        store = SlotKVCache(1, 4, torch.float32, [torch.device("cpu")] * 2)
        store.reserve(1, 500)
        store.parts[0].copy_(torch.randn(store.parts[0].shape))
        lengths = [rng.randrange(60) for _ in range(5)]
        order = [*range(5)] if rng.random() < 0.8 else rng.sample(range(5), 5)
        sources, places = draw_places(rng, lengths, range(5)), draw_places(rng, lengths, order)
        before = store.parts[0].clone()
        store.move_tokens(list(zip(sources, places, lengths, strict=True)))
        for source, place, length in zip(sources, places, lengths, strict=True):
            moved = store.parts[0][:, :, place : place + length]
            assert torch.equal(moved, before[:, :, source : source + length])


def draw_places(rng, lengths, order):
    """Where pieces that stand in this order begin, with gaps between them."""
    found, at = dict.fromkeys(order, 0), 0
    for number in order:
        found[number] = at + rng.randrange(25)
        at = found[number] + lengths[number]
    return [found[number] for number in range(len(lengths))]
