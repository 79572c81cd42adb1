"""Step for step what the public samplers of block-diffusion families did (see golden/README.md).

Positions, tokens and confidences of every step, edits included, in one batch and one at a time, with keys
and values kept and without. Our canvas may go on where a public sampler ends, so its steps are ours up to
there; where both end by the same rule, all of ours are theirs.
"""

import json
from itertools import groupby
from math import ceil
from pathlib import Path

import pytest

from dlm_rag import Decoder, Denoiser, Tokenizer
from dlm_rag.config import EngineConfig, load_config
from dlm_rag.config.fields import replace_settings
from dlm_rag.model.checkpoint import open_checkpoint
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import NoRetriever
from dlm_rag.tokenizer import Prompt
from tests.golden.tiny_checkpoints import END_TOKEN_IDS, PAD, write_checkpoint

GOLDEN = Path(__file__).parent
TRACES = {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}
SDAR_RULES = {
    "low_confidence_dynamic": "threshold",
    "low_confidence_static": "top_k",
    "sequential": "sequential",
}


def sdar(public):
    rule = SDAR_RULES[public["remasking_strategy"]]
    threshold = {"commit_threshold": public["confidence_threshold"]} if rule == "threshold" else {}
    return public["block_length"], threshold | {
        "max_new_tokens": public["gen_length"], "commit_rule": rule,
        "steps_per_block": public["denoising_steps"],
    }  # fmt: skip


def fast_dllm_v2(public):
    return public["block_size"], {
        "block_length": public["small_block_size"],
        "max_new_tokens": public["max_new_tokens"] + 1,  # the last store pass gives one token more
        "commit_threshold": public["threshold"],
    }  # fmt: skip


def a2d(public, block_size=None):
    blocks = ceil(public["max_new_tokens"] / public["block_size"])
    return block_size, {
        "max_new_tokens": public["max_new_tokens"], "block_length": public["block_size"],
        "steps_per_block": ceil(public["steps"] / blocks), "schedule": "rounded",
    }  # fmt: skip


def bd3lm(public):
    return a2d(public, public["block_size"])


def llada2(public):
    return public.get("block_size") or public["block_length"], {
        "max_new_tokens": public.get("max_new_tokens") or public["gen_length"],
        "commit_threshold": public["threshold"],
        "steps_per_block": public.get("steps_per_block") or public["steps"],
    }  # fmt: skip


def llada21(public):
    return public["block_size"], {
        "max_new_tokens": public["max_new_tokens"], "commit_threshold": public["threshold"],
        "steps_per_block": public["block_size"] // public["num_to_transfer"],
        "edit_threshold": public["editing_threshold"], "max_edit_steps": public["max_post_steps"],
    }  # fmt: skip


def nemotron(public):
    return public["block_length"], {
        "max_new_tokens": public["gen_length"], "commit_threshold": public["threshold"],
        "steps_per_block": public["steps"],
    }  # fmt: skip


def autoregressive(public):
    return None, public | {"mode": "autoregressive"}


def multi_block(public):
    return public["block_size"], {
        "max_new_tokens": public["max_new_tokens"], "blocks_at_once": public["buffer_size"],
        "block_add_threshold": public["add_block_threshold"] if public["buffer_size"] > 1 else 0.1,
        "semi_complete_threshold": public["semi_complete_threshold"] if public["buffer_size"] > 1 else 0.9,
        "commit_threshold": public["accept_threshold"],
    }  # fmt: skip


# By the beginning of a trace's name: length of attention's blocks, and settings of a public case.
FAMILIES = {
    "multi-block": multi_block, "sdar": sdar, "fast-dllm-v2": fast_dllm_v2, "a2d-bd3lm": bd3lm,
    "a2d-mdlm": a2d, "lladamoe": a2d, "llada21": llada21, "llada2": llada2,
    "nemotron-labs-diffusion-autoregressive": autoregressive, "nemotron": nemotron,
}  # fmt: skip


def cases_of(name):
    """Each case with what it asks of us: block of attention, `DecodeConfig`."""
    trace = TRACES[name]
    family = next(found for start, found in FAMILIES.items() if name.startswith(start))
    for number, case in enumerate(trace["cases"]):
        block, settings = family(trace["settings"] | case.get("settings", {}))
        words = [f"decode.{key}={value}" for key, value in settings.items()]
        yield number, case, block, load_config(None, words).decode


def given(case):
    """The question that stands for a case's prompt."""
    return json.dumps(case["prompt_ids"])


def decoder_of(folder, name, block, corpus, prefix_cache_gib):
    """The tiny checkpoint, with prompts of ids instead of texts and without retrieval."""
    family, public = TRACES[name]["checkpoint"], TRACES[name]["settings"]
    write_checkpoint(family, folder)
    checkpoint = open_checkpoint(folder, block)
    tokenizer = Tokenizer.from_pretrained(checkpoint)
    tokenizer.end_ids = frozenset(public.get("stopping_criteria_idx", [END_TOKEN_IDS.get(family, PAD)]))
    tokenizer.build_prompt = lambda question, passages, system="": Prompt(
        tuple(json.loads(question)), (), ()
    )
    engine = EngineConfig(prefix_cache_gib=prefix_cache_gib)
    return Decoder(Denoiser.from_pretrained(checkpoint), NoRetriever(corpus, 1), tokenizer, engine=engine)


def decode(decoder, cases, batch, **changes):
    """Rollouts by number of the case, and how many tokens each call of the denoiser ran."""
    decoder.config = replace_settings(decoder.config, batch_size=batch)
    ran, encode = [], decoder.denoiser.encode
    decoder.denoiser.encode = lambda rows, **given: ran.append(len(rows.ids)) or encode(rows, **given)
    waiting, found = list(cases), {}
    with decoder.new_engine() as engine:
        while waiting or engine.busy:
            while waiting and engine.capacity:
                number, case, _, settings = waiting.pop(0)
                engine.submit(Question(f"{number}", given(case)), replace_settings(settings, **changes))
            found |= {int(e.rollout.id): e.rollout for e in engine.step() if e.finished}
    decoder.denoiser.encode = encode
    return found, ran


def ends_as_ours(name, public):
    """Whether its sampler ends where `early_stopping` does: at an end token with no mask before it."""
    early = public.get("settings", {}).get("eos_early_stop", False)
    from_left = name == "nemotron-labs-diffusion-autoregressive"
    return from_left or name in ("fast-dllm-v2", "fast-dllm-v2-small") or (name == "llada21" and early)


def check_step(ours, public):
    edited = public.get("edited", {"pos": [], "tok": [], "conf": []})
    for written, theirs in ((ours.committed, public), (ours.edited, edited)):
        assert [token.position for token in written] == theirs["pos"]
        assert [token.token_id for token in written] == theirs["tok"]
        assert [token.confidence for token in written] == pytest.approx(theirs["conf"], abs=1e-4)


def grouped(name, folder, corpus, prefix_cache_gib=None):
    """A decoder for each length of blocks in a trace, with its cases."""
    for block, group in groupby(cases_of(name), key=lambda found: found[2]):
        yield decoder_of(folder / f"{block}", name, block, corpus, prefix_cache_gib), list(group)


@pytest.mark.parametrize(
    ("batch", "prefix_cache_gib"),
    [pytest.param(8, None, id="a batch"), pytest.param(1, 0.0, id="alone", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", TRACES)
def test_every_step_is_the_public_one(tmp_path, corpus, name, batch, prefix_cache_gib):
    for decoder, cases in grouped(name, tmp_path, corpus, prefix_cache_gib):
        found, _ = decode(decoder, cases, batch, early_stopping=False)
        for number, case, *_ in cases:
            steps = found[number].steps[1:]
            assert len(steps) >= len(case["steps"])
            for ours, public in zip(steps, case["steps"], strict=False):
                check_step(ours, public)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_a_text_ends_no_later_than_the_public_one_and_costs_no_more_calls(tmp_path, corpus, name):
    """A finished block is a row of the next call; it runs once, and the window behind it once a step."""
    for decoder, cases in grouped(name, tmp_path, corpus):
        for case in cases:
            number, public, block, settings = case
            found, ran = decode(decoder, [case], 1, query_policy="question")
            assert len(ran) == found[number].forwards
            ends = bool(decoder.tokenizer.end_ids.intersection(public["tokens"]))
            if ends or not name.startswith("fast-dllm"):  # whose canvas ends before ours
                assert len(ran) <= sum(public["forwards"].values())
            if ends and ends_as_ours(name, public):
                assert len(ran) == len(public["steps"])
            if block is not None:
                window = block if decoder.denoiser.config.shifted else (1 + settings.blocks_at_once) * block
                assert max(ran[1:], default=0) <= window
