"""Traces of Nemotron-Labs-Diffusion's own sampler, as mlx-vlm has it, on mlx-vlm's modelling code.

    python tests/golden/make_nemotron_labs_diffusion.py --reference CHECKOUT   (torch, mlx[cpu], pillow)

CHECKOUT is of Blaizzy/mlx-vlm. Its sampler `native` is the `generate` of the model's card: the prompt and
each finished block run causally, which gives the first token of the next block, and the block is filled by
threshold (SGLang calls that rule FastDiffuser). Its `ar_generate` is another mode of the card. The
encoder's calls are listened to.
"""

import json
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
WRITTEN = {"max_new_tokens": 24}  # from left to right
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
    """Tells a recorder of causal passes; that a token was kept shows in where the next call begins."""

    def __init__(self, recorder: StepRecorder, prompt_length: int) -> None:
        self.recorder, self.prompt_length, self.written = recorder, prompt_length, prompt_length
        self.open: Tensor | None = None  # the probabilities of the last pass for the next token

    def hear(self, ids: Tensor, start: int, stores: bool, logits: Tensor) -> None:
        self.settle(start)
        self.open = logits[-1].softmax(-1)
        self.recorder.forwards["store"] += 1

    def settle(self, stored: int) -> None:
        """The token at `stored` is known now."""
        if self.open is None or stored < self.written:
            return
        two = self.open.topk(2)
        self.recorder.note("token", two.values[0] - two.values[1])
        self.recorder.add([stored - self.prompt_length], [int(two.indices[0])], [float(two.values[0])])
        self.recorder.steps[-1]["store"] = True
        self.written, self.open = stored + 1, None


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

    def write(recorder: StepRecorder, ids: list[int]) -> list[int]:
        listener = CausalListener(recorder, len(ids))
        listen(model, listener)
        found = model.ar_generate(mx.array([ids]), eos_token_id=PAD, **WRITTEN)[0][0].tolist()
        listener.settle(len(found) - 1)
        return found[len(ids) :]

    path = given.out / f"{FAMILY}-autoregressive.json"
    origin_of_text = TraceOrigin(SOURCE, "models/nemotron_labs_diffusion/language.py, ar_generate", FAMILY)
    record_trace(path, origin_of_text, WRITTEN, LONG, write)
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
