"""What a model is shown of a row, and the numbers that the row draws for a step."""

import numpy as np

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.canvas import NoisyCanvas
from dlm_rag.decode.proposer import View
from dlm_rag.decode.row import Row
from dlm_rag.diffusion.renoise import temperature
from dlm_rag.randomness import uniform_numbers

SPREAD_RULES = ("entropy", "margin", "entropy_bound")


def view_of(row: Row) -> View:
    """What the model is shown of a row; draws the numbers that its sampling takes."""
    assert row.arrangement is not None
    settings, positions = row.settings, row.positions
    uniform, soft, lots, heat = None, None, None, settings.temperature
    # Numbers for every position of the canvas, masked or not: one each, or five for a policy, or two.
    if isinstance(row.canvas, NoisyCanvas):
        row.lots, heat = _drawn(row, 2), _heat(settings, row.canvas.taken)
        uniform = row.lots[0, positions]
    elif settings.by_lot:
        row.lots = _drawn(row, 5)
        if settings.commit_rule == "sampled":
            soft = (settings.temperature or 1.0, settings.commit_threshold, settings.gate_width)
            lots = row.lots[:2, positions]
    elif settings.temperature:
        uniform = _drawn(row, 1)[0, positions]
    begin, end = row.window
    return View(
        slot=row.slot,
        arrangement=row.arrangement,
        canvas=row.canvas.shown[:end],
        positions=positions,
        finished=begin,
        temperature=0.0 if soft else heat,
        uniform=uniform,
        spread=settings.commit_rule in SPREAD_RULES,
        soft=soft,
        lots=lots,
        copying=row.copying,
        copy_price=settings.copy_price or 0.0,
    )


def _heat(settings: DecodeConfig, taken: int) -> float:
    assert settings.steps_per_block is not None
    assert settings.temperature_high is not None and settings.temperature_low is not None
    return temperature(taken, settings.steps_per_block, settings.temperature_high, settings.temperature_low)


def _drawn(row: Row, count: int) -> np.ndarray:
    """Uniform numbers (count, length) of the row's own."""
    return uniform_numbers(row.generator, count, row.canvas.length)
