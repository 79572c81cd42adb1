"""What a public sampler did, seen from the calls of its model: no sampler is rewritten or even wrapped."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_experts import fingerprint

NEAREST = 1e-4  # a confidence this close to a threshold would prove nothing but rounding


@dataclass
class Call:
    """One call of a model: where its tokens stand, what they were, what the logits said of them."""

    start: int
    ids: torch.Tensor  # (T,), before the sampler wrote
    live: torch.Tensor  # (1, T), the sampler's own tensor
    tokens: torch.Tensor  # (T,), the likeliest
    confidences: torch.Tensor  # (T,)
    stores: bool


def record(model: torch.nn.Module) -> list[Call]:
    """From now on every call of the model is in the list that is returned."""
    calls: list[Call] = []
    inner = getattr(model, "plain_forward", model.forward)
    model.plain_forward = inner

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        before = input_ids[0].clone()
        output = inner(input_ids, **options)
        confidences, tokens = output.logits[0].softmax(-1).max(-1)
        positions = options.get("position_ids")
        start = 0 if positions is None else int(positions[0, 0])
        stores = bool(options.get("store_kv"))
        calls.append(Call(start, before, input_ids, tokens, confidences, stores))
        return output

    model.forward = forward
    return calls


def at(call: Call, start: int, length: int) -> torch.Tensor | None:
    """The tokens of some positions as a later call saw them, None where it did not."""
    first = start - call.start
    return call.ids[first : first + length] if 0 <= first <= len(call.ids) - length else None


def changes(calls: Sequence[Call], final: torch.Tensor) -> Iterator[tuple[Call, torch.Tensor]]:
    """Each call that does not store, with the tokens of its positions after the sampler wrote."""
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        if not call.stores:
            after = at(following, call.start, len(call.ids)) if following else None
            yield call, final[call.start : call.start + len(call.ids)] if after is None else after


def written(call: Call, where: torch.Tensor, prompt: int) -> dict[str, list[Any]]:
    """Positions (0 = the first behind the prompt), tokens and confidences of some rows of a call."""
    rows = where.nonzero()[:, 0].tolist()
    return {
        "pos": [call.start + row - prompt for row in rows],
        "tok": [int(call.tokens[row]) for row in rows],
        "conf": [round(float(call.confidences[row]), 7) for row in rows],
    }


def steps_of(calls: Sequence[Call], final: torch.Tensor, prompt: int, mask_id: int) -> list[dict[str, Any]]:
    """The steps of a trace; tokens written over others are `edited`."""
    steps = []
    for call, after in changes(calls, final):
        changed = call.ids != after
        assert (after[changed] == call.tokens[changed]).all(), "the sampler wrote something else"
        step: dict[str, Any] = written(call, changed & (call.ids == mask_id), prompt)
        if (edited := changed & (call.ids != mask_id)).any():
            step["edited"] = written(call, edited, prompt)
        steps.append(step)
    return steps


def nearest(calls: Sequence[Call], limits: tuple[int, float | None, float | None], mask_id: int) -> float:
    """How close a confidence of an active block came to its threshold, at most 1."""
    block, fill, edit = limits
    distance = 1.0
    for call in calls:
        for old, confidence in zip(call.ids[-block:], call.confidences[-block:], strict=True):
            threshold = fill if old == mask_id else edit
            if threshold is not None and not call.stores:
                distance = min(distance, abs(float(confidence) - threshold))
    return distance


@dataclass
class Wanted:
    """A case to look for: the length of its prompt, arguments that differ, what must happen in it."""

    prompt: int
    settings: dict[str, Any]
    holds: Callable[[dict[str, Any]], bool] = lambda case: True


@dataclass
class Family:
    """A public model and sampler: `run` returns the canvas (1, P + L), or only the answer in it."""

    name: str  # of the files
    checkpoint: str  # of tiny_experts.FAMILIES
    model: torch.nn.Module
    mask_id: int
    run: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
    settings: dict[str, Any]
    # How long an active block is, the thresholds for its masks and its written tokens, None where none.
    limits: Callable[[dict[str, Any]], tuple[int, float | None, float | None]]
    answers: bool = False  # what is returned is cut off, and begins behind the prompt

    def case(self, prompt: torch.Tensor, settings: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """A case, and how close a confidence came to a threshold."""
        calls = record(self.model)
        returned = self.run(prompt, settings)[0]
        # A window of the canvas is a view of it.
        final = calls[0].live._base[0] if self.answers else returned
        length = prompt.shape[1]
        return {
            "prompt_ids": prompt[0].tolist(),
            "tokens": final[length:].tolist(),
            **({"answer": returned.tolist()} if self.answers else {}),
            "forwards": {
                "denoise": sum(not call.stores for call in calls),
                "store": sum(call.stores for call in calls),
            },
            "steps": steps_of(calls, final, length, self.mask_id),
        }, nearest(calls, self.limits(settings), self.mask_id)

    def find(self, wanted: Wanted, seed: int) -> tuple[dict[str, Any], float]:
        """The first prompt whose trace is as wanted, far from the thresholds, and the same in float64."""
        settings = {**self.settings, **wanted.settings}
        for attempt in range(1000):
            random = np.random.RandomState(1000 * seed + attempt)
            prompt = torch.from_numpy(random.randint(0, 256, (1, wanted.prompt)))
            case, distance = self.case(prompt, settings)
            if distance < NEAREST or not wanted.holds(case):
                continue
            self.model.double()
            again, _ = self.case(prompt, settings)
            self.model.float()
            if places(again) != places(case):
                continue
            steps = case["steps"]
            print(
                f"{self.name}: prompt {wanted.prompt}, {wanted.settings}: attempt {attempt}, "
                f"{len(steps)} steps, most in one {max(len(step['pos']) for step in steps)}, "
                f"edits {sum(len(step['edited']['pos']) for step in steps if 'edited' in step)}, "
                f"nearest threshold {distance:.1e}, float64 off by {drift(case, again):.1e}"
            )
            return {**({"settings": wanted.settings} if wanted.settings else {}), **case}, distance
        raise SystemExit(f"{self.name}: no prompt of {wanted.prompt} tokens with {wanted.settings} will do")

    def write(self, out: Path, origin: dict[str, str], cases: list[Wanted]) -> None:
        """NAME.json: the traces, a case a line; `settings` of a case differ from those above it."""
        found = [self.find(wanted, number) for number, wanted in enumerate(cases)]
        head = {
            **origin, "checkpoint": self.checkpoint, "weights": fingerprint(self.checkpoint),
            "settings": self.settings, "nearest": {"threshold": min(distance for _, distance in found)},
        }  # fmt: skip
        lines = ",\n".join(json.dumps(case) for case, _ in found)
        (out / f"{self.name}.json").write_text(json.dumps(head)[:-1] + ',\n"cases": [\n' + lines + "\n]}\n")

    def write_logits(self, out: Path, source: str, attention_block: int | None) -> None:
        """NAME.safetensors: raw logits (2, 48, V) of input_ids, a third of them masks."""
        random = np.random.RandomState(7)
        ids = torch.from_numpy(random.randint(0, 256, (2, 48)))
        ids[torch.from_numpy(random.random_sample((2, 48)) < 1 / 3)] = self.mask_id
        sight = {} if attention_block is None else {"attention_mask": block_mask(48, attention_block)}
        with torch.no_grad():
            tensors = {"input_ids": ids, "logits": self.model(ids, **sight).logits.contiguous()}
        about = {
            "source": source, "checkpoint": self.checkpoint, "row i predicts": "i",
            "attention_block": str(attention_block),
        }  # fmt: skip
        path = out / f"{self.name}.safetensors"
        save_file(tensors, path, metadata=about)
        path.chmod(0o644)


def block_mask(length: int, block: int) -> torch.Tensor:
    """(1, 1, T, T), 0 where a token sees another, -inf elsewhere: blocks counted from the first token."""
    number = torch.arange(length) // block
    return (number[:, None] >= number).float().log()[None, None]


def arguments(description: str | None) -> argparse.Namespace:
    """`--reference` and `--out`; from here on torch computes with one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--reference", type=Path, required=True, help="a checkout of the public code")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    torch.set_num_threads(1)
    return parser.parse_args()


def places(case: dict[str, Any]) -> list[Any]:
    """What a case writes where, step by step."""
    both = [(step, step.get("edited", {"pos": [], "tok": []})) for step in case["steps"]]
    return [(step["pos"], step["tok"], edited["pos"], edited["tok"]) for step, edited in both]


def drift(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two runs' confidences."""
    pairs = zip(one["steps"], other["steps"], strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x["conf"], y["conf"], strict=True))
