"""Traces of tiny models."""

from dataclasses import asdict, replace

from dlm_rag import Decoder
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.trace_file import TraceHeader, TraceWriter, build_trace_header
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.rollouts import make_two_step_rollout
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
    return Decoder(
        tiny_denoiser(shifted=shifted, **SHAPE),
        RotatingRetriever(corpus, top_k),
        tiny_tokenizer(template),
        DecodeConfig(**({"max_new_tokens": 12, "commit_threshold": 0.4} | settings)),
        layout,
    )


def make_trace_header(decoder):
    return build_trace_header(
        decoder.denoiser.config, decoder.tokenizer, decoder.evidence_layout, decoder.config,
        top_k=decoder.retriever.top_k, model="weights", corpus="passages",
    )  # fmt: skip


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
