"""What a model is shown of a row, and the numbers that the row draws for a step."""

import numpy as np

from dlm_rag.config import DecodeConfig
from dlm_rag.decode.canvas import UniformNoiseCanvas
from dlm_rag.decode.model_runner import ModelInput
from dlm_rag.decode.row import Row
from dlm_rag.diffusion.commit_rules import find_rule, samples_actions
from dlm_rag.diffusion.uniform_decoding import anneal_temperature
from dlm_rag.randomness import sample_uniform


def build_model_input(row: Row) -> ModelInput:
    """What the model is shown of a row; draws the numbers that its sampling takes."""
    assert row.laid_out_prompt is not None
    settings, positions = row.settings, row.positions_to_predict
    assert settings.commit_rule is not None
    statistics = find_rule(settings.commit_rule).statistics
    uniform, soft, lots, heat = None, None, None, settings.temperature
    # Numbers for every position of the canvas, masked or not: one each, or five for a policy, or two.
    if isinstance(row.canvas, UniformNoiseCanvas):
        row.uniform_draws, heat = _draw_uniform(row, 2), _step_temperature(settings, row.canvas.block_steps)
        uniform = row.uniform_draws[0, positions]
    elif samples_actions(settings):
        row.uniform_draws = _draw_uniform(row, 5)
        if "actions" in statistics:
            soft = (settings.temperature or 1.0, settings.commit_threshold, settings.gate_temperature)
            lots = row.uniform_draws[:2, positions]
        elif settings.temperature:
            uniform = row.uniform_draws[0, positions]
    elif settings.temperature:
        uniform = _draw_uniform(row, 1)[0, positions]
    begin, end = row.window
    return ModelInput(
        slot=row.slot,
        laid_out_prompt=row.laid_out_prompt,
        canvas=row.canvas.model_ids[:end],
        positions=positions,
        finished_length=begin,
        temperature=0.0 if soft else heat,
        quantiles=uniform,
        needs_entropy="spread" in statistics,
        soft_threshold=soft,
        policy_quantiles=lots,
        copy_sources=row.copy_sources,
        copy_penalty=settings.copy_penalty or 0.0,
    )


def _step_temperature(settings: DecodeConfig, taken: int) -> float:
    assert settings.steps_per_block is not None
    assert settings.temperature_high is not None and settings.temperature_low is not None
    return anneal_temperature(
        taken, settings.steps_per_block, settings.temperature_high, settings.temperature_low
    )


def _draw_uniform(row: Row, count: int) -> np.ndarray:
    """Uniform numbers (count, length) of the row's own."""
    return sample_uniform(row.generator, count, row.canvas.length)
