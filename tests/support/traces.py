"""Traces of tiny models."""

from dataclasses import asdict, replace
from unittest.mock import patch

from dlm_rag import Decoder
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.trace_file import TraceHeader, TraceWriter, build_trace_header
from dlm_rag.engine import engine
from dlm_rag.evidence.prompt_segments import ContextBudget, fit_passages, lay_out_prompt
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.tokenizer import Tokenizer, load_tokenizer
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.rollouts import canvases_of, make_two_step_rollout
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

TRACE_QUESTIONS = [
    Question("a", "Who wrote Emma?", ("Jane Austen",), ("emma", "austen")),
    Question(
        "b", "Where was the author of Dune born, and in which country is that?", ("Tacoma",), ("dune",)
    ),
    Question("c", "Dune?"),
    Question("d", "Who is it?"),  # two facts fill the context to the last token, the third is dropped
]


# Of three passages one or two fit, the last of them cut.
SHAPE = {"max_position_embeddings": 140, "passage_length": 40}


class RotatingRetriever(CorpusRetriever):
    """Finds other passages at every search."""

    def rank(self, queries, depth):
        return [[(len(query.text) + n) % len(self.corpus) for n in range(depth)] for query in queries]

    def key(self, query):
        return query.text


def make_decoder(corpus, layout, top_k=3, shifted=False, **settings):
    template = PromptTemplate(head="{question}\n", fact=PromptTemplate.from_checkpoint(None, layout).fact)
    config = DecodeConfig(**({"max_new_tokens": 12, "commit_threshold": 0.4} | settings))
    denoiser, retriever = tiny_denoiser(shifted=shifted, **SHAPE), RotatingRetriever(corpus, top_k)
    return Decoder(denoiser, retriever, tiny_tokenizer(template), config, layout)


def decode_and_spy(decoder, questions):
    """The rollouts; by question and step the arrangement and the canvas that the denoiser is shown."""
    seen, launch = {}, engine.launch_step

    def spy(runner, rows):
        seen.update({(r.question.id, r.step): (r.laid_out_prompt, r.canvas.ids.tolist()) for r in rows})
        return launch(runner, rows)

    with patch.object(engine, "launch_step", spy):
        return decoder.decode(questions), seen


def make_trace_header(decoder):
    return build_trace_header(
        decoder.denoiser.config, decoder.tokenizer, decoder.evidence_layout, decoder.config,
        top_k=decoder.retriever.top_k, model="weights", corpus="passages",
    )  # fmt: skip


def rebuild_tokenizer(header, folder):
    """The tokenizer in a checkpoint's folder, with the prompt of a trace."""
    return Tokenizer(load_tokenizer(folder), header.mask_id, header.template, header.end_ids)


def rebuild_evidence(rollout, header, tokenizer):
    """The evidence with its prompt after each step: of step s the denoiser saw that after step s - 1."""
    lengths = header.context_length, rollout.canvas_length, header.passage_length
    for step in rollout.steps:
        found = {name: rollout.passages[name] for name in (*step.passage_ids, *step.dropped)}
        room = ContextBudget(rollout.prompt_layout, *lengths)
        yield fit_passages(tokenizer, rollout.question, found, room)


def rebuild_inputs(rollout, header, tokenizer):
    """By question and step, the prompt as the denoiser saw it, and the canvas."""
    same = ("passage_length", "shifted", "block_size", "block_grid")
    shape = DenoiserConfig(1, **{name: getattr(header, name) for name in same})
    evidence, canvases = rebuild_evidence(rollout, header, tokenizer), canvases_of(rollout, header.mask_id)
    return {
        (rollout.id, step.step): (lay_out_prompt(fitted.prompt, shape, header.prompt_layout), canvas)
        for step, fitted, canvas in zip(rollout.steps[1:], evidence, canvases, strict=False)
    }


def write_rollouts(path, header, rollouts):
    writer = TraceWriter(path, header)
    for rollout in rollouts:
        writer.write(rollout)
    return path


def make_rollout_with(**changes):
    texts = {"a": "text of a", "b": "text of b", "c": "text of c"}
    known = {"passages": texts, "settings": HEADER.settings}
    return replace(make_two_step_rollout(), **(known | changes))


HEADER = TraceHeader(
    prompt_layout="joint", context_length=64, passage_length=9, shifted=False, template=PromptTemplate(),
    mask_id=256, end_ids=(257,), top_k=2, model="m", corpus="c",
    settings=asdict(DecodeConfig(max_new_tokens=3)),
)  # fmt: skip
