"""DiffusionGemma at the size of 26B-A4B, with random weights: bytes anywhere, milliseconds a step on a GPU.

    python profiling/bench_diffusion_gemma.py

The numbers of `LARGE_TEXT_CONFIG` are what is publicly known of the Gemma 4 model of that name; they come
to 25.25 G weights. Without a GPU it counts bytes on the meta device; with one it builds the model there in
bfloat16 (no file is read) and times steps of one and of four rows behind 2,000 tokens each,
self-conditioned. `first_gpu.py --only gemma` does it with more rows, and says where the time goes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_tools import time_calls
from torch import nn

from dlm_rag.decode.sampling import ModelInput
from dlm_rag.decode.uniform_noise import UniformModelRunner
from dlm_rag.evidence.prompt_segments import lay_out_prompt
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.diffusion_gemma import DiffusionGemma
from dlm_rag.model.families.diffusion_gemma import DUMMY_VISION_CONFIG
from dlm_rag.tokenizer import Prompt

LARGE_TEXT_CONFIG = {
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2,
    "sliding_window": 1024, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip
TINY_TEXT_CONFIG = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "sliding_window": 16, "num_experts": 4, "top_k_experts": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, int], int]] = {
    "26b-a4b": (LARGE_TEXT_CONFIG, 256),
    "tiny": (TINY_TEXT_CONFIG, 16),
}  # canvas
PROMPT, SIZE, HEAT = 2000, 2, 0.6  # tokens; bytes of a number; a temperature of its schedule


def build_random_gemma(device: str, shape: str = "26b-a4b") -> Any:
    """The model with fresh weights in bfloat16, on the device from the start and each there once."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    text, canvas = SHAPES[shape]
    raw = {"model_type": "diffusion_gemma", "vision_config": DUMMY_VISION_CONFIG, "canvas_length": canvas}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), skip_weight_allocation():
            config = DiffusionGemmaConfig.from_dict(raw | {"text_config": text})
            model = DiffusionGemmaForBlockDiffusion(config).eval()
    finally:
        torch.set_default_dtype(before)
    if device != "meta":
        draw_random_weights(model, device)
    return model


@contextmanager
def skip_weight_allocation() -> Iterator[None]:
    """Modules made meanwhile have their parameters on the meta device; buffers are as they are made.

    The class makes encoder and decoder, then has them share weights: on a GPU it would need twice the room.
    """
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # else it comes to be shared
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def draw_random_weights(model: nn.Module, device: str) -> None:
    """Gives every parameter memory on the device, those that are shared once: ones, or normal numbers."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, bare in module._parameters.items():
            if bare is None:
                continue
            if bare not in made:
                value = torch.empty_like(bare, device=device)
                filled = value.fill_(1.0) if value.dim() < 2 else value.normal_(std=0.02)
                made[bare] = nn.Parameter(filled, requires_grad=False)
            module._parameters[name] = made[bare]


def make_gemma_runner(device: str, shape: str = "26b-a4b") -> UniformModelRunner:
    """The model behind what a step asks of it."""
    model = build_random_gemma(device, shape)
    text = model.config.text_config
    config = DenoiserConfig(
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        block_size=model.config.canvas_length,
        evidence_layout="prefix",
    )
    return UniformModelRunner(DiffusionGemma(model, config))


def count_model_bytes() -> dict[str, int]:
    """Bytes in bfloat16: of the weights that text meets; of a row, the keys of a token and its logits, and
    what its tokens are drawn by, one row after another."""
    model = build_random_gemma("meta")
    layers = model.model.encoder.language_model.layers
    width = [layer.self_attn.k_proj.out_features for layer in layers]
    sliding = [n for n, layer in zip(width, layers, strict=True) if layer.self_attn.is_sliding]
    vocabulary, canvas = model.config.text_config.vocab_size, model.config.canvas_length
    text = {id(value): value.numel() for value in (*model.model.decoder.parameters(), model.lm_head.weight)}
    return {
        "weights": SIZE * sum(text.values()),
        "keys and values of a token": SIZE * 2 * sum(width),
        "of these in sliding layers": SIZE * 2 * sum(sliding),
        "self-conditioning of a row": SIZE * canvas * vocabulary,
        "float32 logits of a row": 4 * canvas * vocabulary,
        "numbers that a row is drawn by": 3 * 8 * canvas * vocabulary,  # float64: logits, shares, sums
    }  # fmt: skip


def make_random_inputs(shape: DenoiserConfig, rows: int, prompt: int) -> list[ModelInput]:
    """Rows in the middle of their first canvas, behind different prompts of so many random tokens."""
    random, canvas = np.random.default_rng(0), shape.block_size
    assert canvas is not None
    found = []
    for slot in range(rows):
        ids = tuple(random.integers(shape.vocab_size, size=prompt).tolist())
        laid_out = lay_out_prompt(Prompt(ids, (), ()), shape, "prefix", "recompute")
        ids_now = random.integers(shape.vocab_size, size=canvas)
        draws = random.random(canvas)
        found.append(ModelInput(slot, laid_out, ids_now, np.arange(canvas), HEAT, draws))
    return found


@torch.inference_mode()
def measure_step_ms(
    proposer: UniformModelRunner, views: list[ModelInput], repeats: int = 10
) -> tuple[float, float, float]:
    """Of running the prompt of one row; of the model in a step of all; and of the whole step.

    A step is self-conditioned, its evidence has not changed, and its tokens are drawn and read.
    """
    denoiser, device = proposer.denoiser, proposer.denoiser.device
    ids = views[0].laid_out_prompt.canvas_prefix.ids

    def measure(call: Callable[[], Any]) -> float:
        return 1000 * median(time_calls(call, device, repeats))

    prompt, whole = (
        measure(lambda: denoiser.extend_cache([], ids)),
        measure(lambda: proposer.propose(views)),
    )
    (_, texts) = proposer._stacked or (None, None)
    assert texts is not None
    canvas = torch.from_numpy(np.stack([view.canvas for view in views])).to(device)
    before = [proposer._prefixes.slots[view.slot].previous_logits for view in views]
    return prompt, measure(lambda: denoiser.compute_canvas_logits(canvas, texts, before)), whole


def run_gemma_benchmark() -> dict[str, float]:
    """What is counted, and measured where there is a GPU; prints it."""
    found: dict[str, float] = dict(count_model_bytes())
    if torch.cuda.is_available():
        proposer = make_gemma_runner("cuda")
        for rows in (1, 4):
            views = make_random_inputs(proposer.shape, rows, PROMPT)
            prompt, model, step = measure_step_ms(proposer, views)
            found |= {f"ms for {PROMPT} tokens of a prompt": prompt}
            found |= {f"ms of the model for {rows}": model, f"ms for a step of {rows}": step}
        found["bytes at the peak"] = torch.cuda.max_memory_allocated()
    for name, value in found.items():
        print(f"{name:32} {value:18,.1f}")
    return found


if __name__ == "__main__":
    run_gemma_benchmark()
