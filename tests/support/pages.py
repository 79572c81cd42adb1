"""Rollouts and traces for pages."""

from dataclasses import replace

from dlm_rag.decode.rollout import Rollout, RolloutStep
from dlm_rag.decode.trace_file import TraceWriter, build_trace_header
from tests.support.rollouts import make_committed_token

END = 9


def cited(words, passages=(), unsupported=(), kind="reasoning"):
    sources = [{"id": name, "step": 1, "words": list(held)} for name, held in passages]
    return {"text": words, "kind": kind, "passages": sources, "unsupported": list(unsupported)}


def make_two_hop_rollout() -> Rollout:
    """Emma -> Jane Austen -> Steventon: the bridge is asked for at step 1 and found at step 2."""
    return Rollout(
        id="q1",
        question="Where was the author of Emma born?",
        prompt_layout="joint",
        canvas_length=8,
        steps=[
            RolloutStep(0, "Where was the author of Emma born?", ("emma",), True),
            RolloutStep(1, "Where was the author of Emma born? Jane Austen. Bat", ("emma", "dune"), True,
                 (make_committed_token(0, 1, " Jane", 0.995), make_committed_token(1, 2, " Austen", 0.6))),
            RolloutStep(2, None, ("austen",), True, (make_committed_token(3, 3, " Bath", 0.4),
            make_committed_token(7, END, "<end>", 1.0)),
                 dropped=("emma",)),
            RolloutStep(3, "Where was the author of Emma born? Jane Austen. Steventon", ("austen",), True,
                 (make_committed_token(2, 4, ".", 0.99), make_committed_token(4, 5, " ###", 0.99)),
                 remasked=(3,)),
            RolloutStep(4, "Where was the author of Emma born? Jane Austen. Steventon", ("austen",), False,
                 (make_committed_token(3, 6, " Steventon", 0.91), make_committed_token(5, 6, " Steventon",
                 0.93),
                  make_committed_token(6, END, "<end>", 1.0))),
        ],
        response="Jane Austen. Steventon ### Steventon",
        passages={
            "emma": "Emma (novel)\nEmma is a novel by Jane Austen.",
            "austen": "Jane Austen (author)\nJane Austen was born in Steventon.",
            "dune": "Dune\nDune is a novel.",
        },
        citations=[
            cited("Jane Austen.", [("emma", ["jane", "austen"])]),
            cited("Steventon", [("austen", ["steventon"])]),
            cited("Steventon", [("austen", ["steventon"])], kind="answer"),
        ],
        settings={"query_policy": "proxy", "query_threshold": 0.0},
        finished=True,
    )  # fmt: skip


def header(rollout, corpus="passages"):
    from dlm_rag.config import DecodeConfig
    from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

    made = build_trace_header(
        tiny_denoiser().config, tiny_tokenizer(), "joint", DecodeConfig(**rollout.settings),
        top_k=2, model="weights", corpus=corpus,
    )  # fmt: skip
    return replace(made, end_ids=(END,))


def write_trace(path, *rollouts):
    writer = TraceWriter(path, header(rollouts[0]))
    for rollout in rollouts:
        writer.write(rollout)
    return path
