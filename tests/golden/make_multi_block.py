"""Traces of the rule of MBD-LMs, several blocks at once, from a checkout of SJTU-DENG-Lab/Diffulex.

    python tests/golden/make_multi_block.py --reference DIFFULEX --model SDAR           (transformers 4.53)
    python tests/golden/make_multi_block.py --reference DIFFULEX --model DLLM --llada2  (transformers 4.57)

--model: a checkout of the public modelling code, as for make_sdar.py and make_llada2.py. Besides torch this
needs einops, easydict, xxhash and tqdm.

Public is what decides: the state of a request and its blocks (which one joins, which waits for its keys and
values, which is done), what the sampler accepts of a call's logits, and how the scheduler writes it. So is
the model. In place of the engine for CUDA there is `answer`: one call of the model a step, on all tokens up
to the end of the block buffer, each seeing its own block and those before it. The engine has kept what is
before the buffer; here it is computed again, which comes to the same where no block sees a later one.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from make_sdar import stand_in_for_kernels
from tiny_checkpoints import MASK, PAD
from torch import Tensor
from trace_recorder import (
    StepRecorder,
    TraceOrigin,
    load_tiny_model,
    make_prompt_bytes,
    parse_arguments,
    stub_packages,
    write_trace,
)

SOURCE = "SJTU-DENG-Lab/Diffulex@184ba97cc6a9c540acceaa6ec3311394b23932a2"
MODELS = {
    "sdar": "modeling_sdar.py of JetAstra/SDAR@c2041a8333333d685f6e15122c84f60f51f85ebd",
    "llada2": "modeling_llada2_moe.py of ZHZisZZ/dllm@ca176752fbceec49c6b4777a2c18ae88e4eb10ed",
}
RULE = "decoding_strategy=multi_bd: engine/request.py, engine/scheduler.py, sampler"
Cases = list[tuple[int, int, dict[str, Any]]]  # length and seed of a prompt, settings that differ

# The engine leaves SDAR's sampler at its default threshold of 0.95; here it is given another, so that some
# tokens are committed together. The other thresholds are those of the paper's experiments (branch mbd-lms).
SDAR = {
    "block_size": 4, "buffer_size": 4, "add_block_threshold": 0.1, "semi_complete_threshold": 0.25,
    "accept_threshold": 0.85, "max_new_tokens": 32,
}  # fmt: skip
LLADA2 = {
    "block_size": 8, "buffer_size": 2, "add_block_threshold": 0.1, "semi_complete_threshold": 0.9,
    "accept_threshold": 0.95, "max_new_tokens": 40,
}  # fmt: skip
CODE = {"add_block_threshold": 0.75, "semi_complete_threshold": 0.75}
SDAR_CASES: Cases = [
    (12, 0, {}),
    (13, 1, {}),
    (7, 3, {"buffer_size": 2}),
    (3, 4, {"buffer_size": 3, "semi_complete_threshold": 0.9}),
    (18, 2, CODE),
    (16, 5, {"buffer_size": 1}),
]
LLADA2_CASES: Cases = [
    (16, 0, {}),
    (13, 1, {"accept_threshold": 0.9, "buffer_size": 3}),
    (5, 2, {"accept_threshold": 0.85, "buffer_size": 4, "semi_complete_threshold": 0.5}),
    (11, 3, {"accept_threshold": 0.85, "add_block_threshold": 0.9}),
    (22, 4, {"accept_threshold": 0.8, "buffer_size": 4}),
    (8, 5, {"buffer_size": 1}),
]


def load_rule(family: str) -> SimpleNamespace:
    """The public classes."""
    sampler = import_module(f"diffulex.sampler.{family}")
    return SimpleNamespace(
        sample=sampler.SDARSampler() if family == "sdar" else sampler.LLaDA2Sampler(),
        scheduler=import_module("diffulex.engine.scheduler").SchedulerBase,
        request=import_module("diffulex.strategy.multi_bd.engine.request").MultiBDReq,
        parameters=import_module("diffulex.sampling_params").SamplingParams,
        thresholds=import_module("diffulex.config").DecodingThresholds,
        metadata=import_module("diffulex.attention.metadata"),
    )


def answer(
    rule: SimpleNamespace,
    run: Callable[[Tensor, int], Tensor],
    recorder: StepRecorder,
    ids: list[int],
    used: dict[str, Any],
) -> list[int]:
    """The tokens behind the prompt; run: token ids (n,) and the length of a block to logits (n, V)."""
    length, block = used["max_new_tokens"], used["block_size"]
    unlimited = 10**6
    thresholds = (used[f"{name}_threshold"] for name in ("add_block", "semi_complete", "accept"))
    config = SimpleNamespace(
        block_size=block, buffer_size=used["buffer_size"], mask_token_id=MASK, eos=PAD,
        max_model_len=unlimited, decoding_thresholds=rule.thresholds(*thresholds),
    )  # fmt: skip
    request = rule.request(ids, rule.parameters(temperature=0.0, max_tokens=unlimited, ignore_eos=True))
    request.init_multi_block(config)
    request.make_pending()
    # The canvas ends with the block that holds its last token; what the rule writes behind it is not kept.
    end = -(-(len(ids) + length) // block) * block
    scheduler = object.__new__(rule.scheduler)
    while MASK in (request.token_ids + [MASK] * end)[len(ids) : end]:
        request.step()
        start, shown = request.running_position_ids[0], len(request.running_position_ids)
        tokens = torch.tensor(request.token_ids[: start + shown])
        logits = run(tokens, block)
        metadata = rule.metadata.AttnMetaDataBase(
            [request.is_prefilling], cu_seqlens_q=torch.tensor([0, shown])
        )
        rule.metadata.set_fetch_fn_for_attn_metadata(lambda found=metadata: found)
        waiting = any(each.num_mask_tokens for each in request.dllm_block_buffer.active_blocks)
        stop = min(end, max((b.end for b in request.dllm_block_buffer.valid_blocks), default=0))
        canvas = tokens[len(ids) : stop]
        if waiting:
            recorder.denoise(canvas, 0, logits[len(ids) : stop])
        else:
            recorder.store()
        chosen = rule.sample([request], logits[start:], torch.zeros(1), threshold=used["accept_threshold"])
        note_decisions(recorder, chosen, request, used["accept_threshold"])
        scheduler.postprocess([request], chosen)
        canvas[:] = torch.tensor(request.token_ids[len(ids) : stop])
    return request.token_ids[len(ids) : end]


def note_decisions(recorder: StepRecorder, chosen: Any, request: Any, threshold: float) -> None:
    """How near the sampler's confidences, of which the mask has no share, came to the threshold, and the
    second of a block to the first where one had to be committed.
    """
    for offered in map(torch.tensor, chosen.initial_confidence_map[str(request.req_id)].values()):
        recorder.note("threshold", (offered - threshold).abs().min())
        if len(offered) > 1 and offered.max() <= threshold:
            best, second = offered.topk(2).values
            recorder.note("choice", best - second)


def load_model(family: str, root: Path) -> Callable[[Tensor, int], Tensor]:
    """The public class with our weights: of token ids (n,) and the length of a block the logits (n, V)."""
    if family == "sdar":
        stub_packages(root, "sdar=training/model/SDAR-4B-Chat")
        stand_in_for_kernels()
        model = load_tiny_model(import_module("sdar.modeling_sdar").SDARForCausalLM, family)
    else:
        family_package = "dllm.pipelines.llada2"
        stub_packages(root, "dllm", "dllm.pipelines", family_package, f"{family_package}.models")
        module = import_module(f"{family_package}.models.modeling_llada2_moe")
        model = load_tiny_model(module.LLaDA2MoeModelLM, family)

    def run(ids: Tensor, block: int) -> Tensor:
        places = torch.arange(len(ids))
        sight = places // block <= places[:, None] // block
        if family == "sdar":
            return model(ids[None], attention_mask=sight[None], position_ids=places[None]).logits[0]
        return model(ids[None], attention_mask=sight.float().log()[None, None]).logits[0]

    return run


def main() -> None:
    given = parse_arguments(__doc__, "--llada2", model=Path)
    family = "llada2" if given.llada2 else "sdar"
    settings, cases = (LLADA2, LLADA2_CASES) if given.llada2 else (SDAR, SDAR_CASES)
    sys.path.insert(0, str(given.reference))
    rule, run, answers = load_rule(family), load_model(family, given.model), []
    for length, seed, different in cases:
        used, ids = settings | different, make_prompt_bytes(length, seed)
        recorder = StepRecorder(used["accept_threshold"], ordered=False)
        case = recorder.case(ids, answer(rule, run, recorder, ids, used))
        answers.append((recorder, ({"settings": different} if different else {}) | case))
    origin = TraceOrigin(SOURCE, f"{RULE}/{family}.py; {MODELS[family]}", family)
    write_trace(given.out / f"multi-block-{family}.json", origin, settings, answers)


if __name__ == "__main__":
    main()
