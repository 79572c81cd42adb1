"""What the scripts that make golden traces share: arguments, the steps of a sampler, the files.

A step is read off the tensors that a sampler hands to its model: they are its own canvas, so what it has
written shows in them at its next call.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_checkpoints import MASK, PAD, digest_checkpoint, write_checkpoint
from torch import Tensor

MIN_DECISION_MARGIN = 1e-4  # that a decision may be to the other one: a closer one could be rounding's


def parse_arguments(description: str | None, *flags: str, **required: type) -> argparse.Namespace:
    """`--reference`, `--out`, flags and further options; from here on torch computes without gradients
    and with one thread.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--reference", type=Path, required=True, help="a checkout of the public code")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    for name, kind in required.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return parser.parse_args()


def stub_packages(root: Path, *names: str) -> None:
    """Packages whose own __init__ is not run, folders below `root`; "a=b/c": package a is folder b/c."""
    for name in names:
        package, _, folder = name.partition("=")
        holder = sys.modules[package] = ModuleType(package)
        holder.__path__ = [str(root / (folder or package.replace(".", "/")))]


def load_tiny_model(kind: Any, family: str) -> Any:
    """A public class with the weights of a family's tiny checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(family, Path(folder))
        model, found = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


def make_prompt_bytes(length: int, seed: int) -> list[int]:
    """A prompt of arbitrary bytes."""
    return np.random.RandomState(seed).randint(0, 256, length).tolist()


@dataclass
class StepRecorder:
    """The steps of one answer. Places are counted from the first token behind the prompt.

    threshold: which confidences are compared with, None for rules that take the n best; ordered: whether
    the rule goes by confidence at all; editing: the threshold at which written tokens are replaced, None
    where they stay.
    """

    threshold: float | None = None
    ordered: bool = True
    editing: float | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    forwards: dict[str, int] = field(default_factory=lambda: {"denoise": 0, "store": 0})
    nearest: dict[str, float] = field(default_factory=dict)
    _open: tuple[Tensor, Tensor, int, Tensor, slice] | None = None

    def denoise(self, canvas: Tensor, start: int, logits: Tensor, among: slice = slice(None)) -> None:
        """A call that proposes: `canvas` (n,) is the sampler's own, its first token stands at `start`.

        logits: (n, V), row i predicts token i of it. among: those that the sampler chooses from.
        """
        self.settle()
        self.forwards["denoise"] += 1
        self._open = (canvas, canvas.clone(), start, logits.softmax(-1), among)

    def store(self, place: int | None = None, logits: Tensor | None = None) -> None:
        """A call that stores keys and values; place and logits (V,): of a token that is taken from it."""
        self.settle()
        self.forwards["store"] += 1
        if logits is not None and place is not None and place >= 0:
            best = logits.softmax(-1).max(-1)
            self.add([place], [int(best.indices)], [float(best.values)])
            self.steps[-1]["store"] = True

    def settle(self) -> None:
        """Writes down what the sampler has made of the last proposals."""
        if self._open is None:
            return
        canvas, before, start, chances, among = self._open
        self._open = None
        confidence, guess = chances.max(-1)
        offered = torch.zeros_like(before, dtype=torch.bool)
        offered[among] = before[among] == MASK
        assert not (guess[offered] == MASK).any(), "a mask is proposed: take other prompts"
        # What stands behind an end token may have been padded since, masks filled at this step included.
        padded = (canvas == PAD) & (guess != PAD) & (canvas != before)
        canvas = torch.where(padded, torch.where(offered, guess, before), canvas)
        written = canvas != before
        edited = written & ~offered
        assert self.editing is not None or written.any() > edited.any(), "what was no mask is written over"
        assert (canvas[written] == guess[written]).all(), "the sampler is not greedy"
        filled = written & offered
        if self.threshold is not None and offered.any():
            self.note("threshold", (confidence[offered] - self.threshold).abs().min())
        if self.editing is not None:
            editable = torch.zeros_like(offered)
            editable[among] = True
            editable &= ~offered & (torch.arange(len(before)) >= -start)
            if editable.any():
                self.note("threshold", (confidence[editable] - self.editing).abs().min())
        if self.ordered and filled.any() and (left := offered & ~written).any():
            self.note("choice", confidence[filled].min() - confidence[left].max())
        if written.any():
            two = chances[written].topk(2).values
            self.note("token", (two[:, 0] - two[:, 1]).min())
        places = torch.arange(start, start + len(before))
        self.add(places[filled].tolist(), guess[filled].tolist(), confidence[filled].tolist())
        if edited.any():
            self.add(places[edited].tolist(), guess[edited].tolist(), confidence[edited].tolist())
            edits = self.steps.pop()
            self.steps[-1]["edited"] = edits

    def add(self, places: list[int], tokens: list[int], confidences: list[float]) -> None:
        assert min(places, default=0) >= 0, "the prompt has been written over"
        self.steps.append({"pos": places, "tok": tokens, "conf": [round(c, 7) for c in confidences]})

    def note(self, what: str, distance: Tensor) -> None:
        self.nearest[what] = min(float(distance), self.nearest.get(what, 1.0))

    def case(self, prompt_ids: list[int], tokens: list[int]) -> dict[str, Any]:
        """The answer as it is stored; tokens: as the sampler returns them behind the prompt."""
        self.settle()
        parts = [part for step in self.steps for part in (step, step.get("edited")) if part]
        said = {n: t for part in parts for n, t in zip(part["pos"], part["tok"], strict=True)}
        wrong = [n for n, token in enumerate(tokens) if token not in (MASK, PAD) and said.get(n) != token]
        assert not wrong, f"the steps do not lead to the tokens at {wrong}"
        return {
            "prompt_ids": prompt_ids, "tokens": tokens, "forwards": self.forwards, "steps": self.steps,
        }  # fmt: skip


@dataclass(frozen=True)
class TraceOrigin:
    """Whose trace it is."""

    source: str  # owner/repository@commit
    sampler: str  # path and function
    family: str  # of `tiny.CONFIGS`


def record_trace(
    path: Path,
    origin: TraceOrigin,
    settings: dict[str, Any],
    prompts: list[tuple[int, int]],
    answer: Callable[[StepRecorder, list[int]], list[int]],
    **rule: Any,
) -> None:
    """The trace of a sampler's answers to prompts, each (length, seed); rule: that of `StepRecorder`."""
    answers = []
    for length, seed in prompts:
        recorder, ids = StepRecorder(**rule), make_prompt_bytes(length, seed)
        answers.append((recorder, recorder.case(ids, answer(recorder, ids))))
    write_trace(path, origin, settings, answers)


def write_trace(path: Path, origin: TraceOrigin, settings: dict[str, Any], answers: list[Any]) -> None:
    """The trace of (recorder, case) pairs, a case a line; prints how near its decisions came."""
    nearest: dict[str, float] = {}
    for recorder, _ in answers:
        for what, distance in recorder.nearest.items():
            nearest[what] = min(distance, nearest.get(what, 1.0))
    head = {
        "source": origin.source, "sampler": origin.sampler, "checkpoint": origin.family,
        "weights": digest_checkpoint(origin.family), "settings": settings, "nearest": nearest,
    }  # fmt: skip
    lines = [json.dumps(case) for _, case in answers]
    text = json.dumps(head)[:-1] + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    path.write_text(text, encoding="utf-8")
    commits = [len(step["pos"]) for _, case in answers for step in case["steps"]]
    ended = [1 + max(n for step in case["steps"] for n in step["pos"]) for _, case in answers]
    print(f"{path.name}: {len(lines)} cases of {ended} tokens, {len(commits)} steps, {nearest}")
    print(f"   tokens a step: {np.bincount(commits).tolist()}")
    assert min(nearest.values()) > MIN_DECISION_MARGIN, "a decision is too close: take other prompts"


def write_logits(path: Path, origin: TraceOrigin, predicts: str, **tensors: Tensor) -> None:
    """`input_ids` and raw logits of the public class; predicts: which token row i predicts."""
    found = {name: value.contiguous() for name, value in tensors.items()}
    save_file(
        found, path, {"source": origin.source, "checkpoint": origin.family, "row i predicts": predicts}
    )


def make_logit_input_ids() -> Tensor:
    """(2, 48) ids, a third of them masks."""
    draw = np.random.RandomState(7)
    ids = draw.randint(0, 256, (2, 48))
    ids[draw.random_sample((2, 48)) < 1 / 3] = MASK
    return torch.from_numpy(ids)
