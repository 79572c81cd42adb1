"""Rows to train on from traces: the prompt and the canvas of each step, and what it committed."""

from collections.abc import Iterator
from dataclasses import dataclass

from dlm_rag.decode.rollout import CommittedToken, Rollout
from dlm_rag.decode.trace_file import TraceHeader, rebuild_prompts
from dlm_rag.engine.rules import find_rule
from dlm_rag.errors import TraceError
from dlm_rag.tokenizer import Prompt, Tokenizer


@dataclass(frozen=True)
class StepExample:
    """One step of a rollout as something to learn from; ids of canvas positions in order."""

    step: int
    prompt: Prompt
    canvas: tuple[int, ...]  # as the denoiser saw it
    committed: tuple[CommittedToken, ...]


def make_step_examples(
    rollout: Rollout, header: TraceHeader, tokenizer: Tokenizer
) -> Iterator[StepExample]:
    """A row for each step that committed; parameters as in `rebuild_prompts`.

    Raises `TraceError` for a trace of uniform noise.
    """
    if find_rule(header.settings.get("commit_rule") or "threshold").redraws:
        raise TraceError(
            f"the trace of question '{rollout.id}' is of a model that denoises from uniform noise, which "
            "is not in it: no rows with masks can be made from it"
        )
    canvases = rollout.canvases(header.mask_id)
    prompts = rebuild_prompts(rollout, header, tokenizer)
    for step, canvas, fitted in zip(rollout.steps[1:], canvases, prompts, strict=False):
        if step.committed:  # else it edited, at most
            yield StepExample(step.step, fitted.prompt, tuple(canvas), step.committed)
