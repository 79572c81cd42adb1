"""Traces of Nemotron-Labs-Diffusion's own sampler, as mlx-vlm has it, on mlx-vlm's modelling code.

    python tests/golden/make_nemotron_labs_diffusion.py --reference CHECKOUT   (torch, mlx[cpu], pillow)

CHECKOUT is of Blaizzy/mlx-vlm. Its sampler `native` is the `generate` of the model's card: the prompt and
each finished block run causally, which gives the first token of the next block, and the block is filled by
threshold (SGLang calls that rule FastDiffuser). Its `ar_generate` and `linear_spec_generate` are the other
modes of the card. Nothing is changed but one number: mlx-vlm begins with drafts of 8 tokens and lengthens
them as they are accepted; the card and SGLang's LinearSpec always draft a whole block, and so it is here.
The encoder's calls are listened to.
"""

import inspect
import json
import textwrap
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from tiny_checkpoints import CONFIGS, MASK, PAD, write_checkpoint
from torch import Tensor
from trace_recorder import (
    StepRecorder,
    TraceOrigin,
    make_logit_input_ids,
    parse_arguments,
    record_trace,
    stub_packages,
    write_logits,
)

SOURCE = "Blaizzy/mlx-vlm@9b13f522a7f1d214f426c67bb292c9e1065e9108"
FAMILY = "nemotron-labs-diffusion"
PACKAGE = "mlx_vlm.models.nemotron_labs_diffusion"
COMMON = {"temperature": 0.0, "sampler": "native", "eos_id": PAD, "mask_id": MASK}
PUBLIC = {"gen_length": 96, "block_length": 32, "steps": 32, "threshold": 0.9}
SMALL = {"gen_length": 32, "block_length": 8, "steps": 8, "threshold": 0.8}
LONG = [(20, 21), (33, 22), (45, 23), (64, 24), (32, 25), (3, 26)]  # prompts as (length, seed)
SHORT = [(5, 10), (13, 1), (16, 1), (8, 5), (24, 7), (1, 0)]
# Whose drafts are accepted more often than those of others.
DRAFTED = [(20, 18), (33, 19), (45, 5), (64, 28), (32, 19), (3, 10)]
DRAFTED_SMALL = [(5, 2), (13, 28), (16, 19), (8, 33), (24, 19), (1, 27)]
WRITTEN = {"max_new_tokens": 48, "block_length": 32}
WRITTEN_SMALL = {"max_new_tokens": 33, "block_length": 8}
# From left to right: which method, with which settings.
CAUSAL_TRACES: dict[str, tuple[str, dict[str, Any], list[tuple[int, int]]]] = {
    "nemotron-labs-diffusion-autoregressive": ("ar_generate", {"max_new_tokens": 24}, LONG),
    "nemotron-labs-diffusion-speculative": ("linear_spec_generate", WRITTEN, DRAFTED),
    "nemotron-labs-diffusion-speculative-small": ("linear_spec_generate", WRITTEN_SMALL, DRAFTED_SMALL),
}
TRACES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "nemotron-labs-diffusion": (PUBLIC, LONG),
    "nemotron-labs-diffusion-small": (SMALL, SHORT),
}


class Listener:
    """Tells a recorder of the encoder's calls in an answer; its arrays are new ones at every step."""

    def __init__(self, model: Any, recorder: StepRecorder, prompt_length: int) -> None:
        self.model, self.recorder, self.prompt_length = model, recorder, prompt_length
        self.canvas: Tensor | None = None  # of the call before

    def see(self, ids: Tensor) -> None:
        """What stands in the block now."""
        if self.canvas is not None:
            self.canvas.copy_(ids)
        self.canvas = None

    def hear(self, ids: Tensor, start: int, stores: bool, logits: Tensor) -> None:
        """A call whose tokens begin at `start`, counted from the prompt's first."""
        self.see(ids)
        at = start - self.prompt_length
        if stores:
            self.recorder.store(at + len(ids), logits[-1])
        else:
            self.canvas = ids.clone()
            self.recorder.denoise(self.canvas, at, logits)


class CausalListener:
    """Tells a recorder of drafts, which write nothing, and of causal passes.

    What a causal pass has written shows in where the next call begins.
    """

    def __init__(self, recorder: StepRecorder, prompt_length: int) -> None:
        self.recorder, self.prompt_length, self.written = recorder, prompt_length, prompt_length
        self.draft: Tensor | None = None  # its probabilities
        self.open: tuple[int, Tensor] | None = None  # a causal pass: where it begins, its probabilities

    def hear(self, ids: Tensor, start: int, stores: bool, logits: Tensor) -> None:
        self.settle(start)
        if stores:
            self.open = (start, logits.softmax(-1))
        else:
            self.draft = logits.softmax(-1)
            self.recorder.add([], [], [])
        self.recorder.forwards["store" if stores else "denoise"] += 1

    def settle(self, stored: int) -> None:
        """Up to `stored` tokens are kept now, and the one behind them is known."""
        if self.open is None or stored < self.written:
            return
        (begin, causal), places = self.open, range(self.written, stored + 1)
        chances = causal[self.written - 1 - begin : stored - begin]
        decided = [chances] if self.draft is None else [chances, self.draft[1 : 1 + len(places)]]
        two = torch.cat(decided).topk(2).values
        self.recorder.note("token", (two[:, 0] - two[:, 1]).min())
        confidence, token = chances.max(-1)
        self.recorder.add([n - self.prompt_length for n in places], token.tolist(), confidence.tolist())
        self.recorder.steps[-1]["store"] = True
        self.written, self.draft, self.open = stored + 1, None, None


def draft_whole_blocks(kind: Any) -> None:
    """Has `linear_spec_generate` begin, and go on, with drafts of a whole block."""
    source = textwrap.dedent(inspect.getsource(kind.linear_spec_generate))
    fixed = source.replace(
        "base_draft_window = min(max_draft_window, 8)", "base_draft_window = max_draft_window"
    )
    assert fixed != source
    names: dict[str, Any] = {}
    exec(fixed, vars(import_module(kind.__module__)), names)
    kind.linear_spec_generate = names["linear_spec_generate"]


def listen(model: Any, listener: Listener | CausalListener | None) -> None:
    """Has the listener told of every call of the encoder; None: nobody."""
    kind = import_module(f"{PACKAGE}.language").NemotronLabsDiffusionEncoder
    public = getattr(kind, "public_call", kind.__call__)
    kind.public_call = public

    def call(self: Any, inputs: Any, **options: Any) -> Any:
        start, stores = options["cache"][0].offset, options["use_cache"]
        hidden = public(self, inputs, **options)
        if listener is not None:
            listener.hear(to_torch(inputs)[0], start, stores, to_torch(model.diffusion_head(hidden))[0])
        return hidden

    kind.__call__ = call


def to_torch(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values)).long() if values.dtype != mx.float32 else torch.tensor(values)


def load_model() -> Any:
    """The public class with the weights of the tiny checkpoint."""
    public = import_module(PACKAGE)
    model = public.Model(public.ModelConfig.from_dict(CONFIGS[FAMILY]))
    with TemporaryDirectory() as folder:
        write_checkpoint(FAMILY, Path(folder))
        weights = model.sanitize(mx.load(f"{folder}/model.safetensors"))
        model.load_weights(list(weights.items()), strict=True)
        mx.eval(model.parameters())
    return model.language_model


def compute_logits(model: Any, ids: Tensor, parts: list[tuple[int, bool]]) -> Tensor:
    """Logits (B, L, V) of consecutive parts, each so long and causal or not, which see those before."""
    cache, found, at = model.make_cache(), [], 0
    for length, causal in parts:
        part = mx.array(ids[:, at : at + length].numpy().astype(np.int32))
        hidden = model.model(part, cache=cache, use_cache=True, use_causal_mask=causal)
        found.append(torch.tensor(np.array(model.diffusion_head(hidden))))
        at += length
    return torch.cat(found, 1)


def main() -> None:
    given = parse_arguments(__doc__)
    mx.set_default_device(mx.cpu)
    stub_packages(given.reference, "mlx_vlm", "mlx_vlm.models", "mlx_vlm.generate")
    model = load_model()
    origin = TraceOrigin(
        SOURCE, "models/nemotron_labs_diffusion/language.py, LanguageModel.generate", FAMILY
    )
    for name, (settings, prompts) in TRACES.items():

        def answer(recorder: StepRecorder, ids: list[int], settings=settings) -> list[int]:
            listener = Listener(model, recorder, len(ids))
            listen(model, listener)
            found = model.generate(mx.array([ids]), **COMMON, **settings)[0].tolist()
            listener.see(torch.tensor(found[-settings["block_length"] :]))
            return found

        record_trace(
            given.out / f"{name}.json", origin, json.loads(json.dumps(COMMON | settings)), prompts, answer,
            threshold=settings["threshold"],
        )  # fmt: skip
    draft_whole_blocks(type(model))
    for name, (method, settings, prompts) in CAUSAL_TRACES.items():

        def write(recorder: StepRecorder, ids: list[int], method=method, settings=settings) -> list[int]:
            listener = CausalListener(recorder, len(ids))
            listen(model, listener)
            ends = {"eos_token_id": PAD}
            if method == "linear_spec_generate":
                ends["mask_token_id"] = MASK
            found = getattr(model, method)(mx.array([ids]), **ends, **settings)[0][0].tolist()
            listener.settle(len(found) - 1)
            return found[len(ids) :]

        path = given.out / f"{name}.json"
        written = TraceOrigin(SOURCE, f"models/nemotron_labs_diffusion/language.py, {method}", FAMILY)
        record_trace(path, written, settings, prompts, write)
    listen(model, None)
    ids = make_logit_input_ids()
    length = ids.shape[1]
    write_logits(
        given.out / f"{FAMILY}.safetensors", origin, "i, in causal parts i + 1", input_ids=ids,
        whole=compute_logits(model, ids, [(length, False)]),
        causal=compute_logits(model, ids, [(length, True)]),
        logits=compute_logits(model, ids, [(32, True), (length - 32, False)]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
