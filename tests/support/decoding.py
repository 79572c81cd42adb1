"""Decoders of tiny models with retrievers that can be followed by hand."""

from dlm_rag import Decoder, load_retriever
from dlm_rag.config import DecodeConfig
from dlm_rag.retrieval.base import CorpusRetriever
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer

QUESTIONS = ["Who wrote Emma?", "Where was the author of Dune born, and in which country is that?", "Dune?"]


LAYOUTS = ["joint", "prefix", "independent"]


def make_decoder(corpus_file, layout="joint", top_k=2, shifted=False, **settings):
    template = PromptTemplate.from_checkpoint(None, layout)
    tokenizer = tiny_tokenizer(PromptTemplate(head="{question}\n", fact=template.fact))
    threshold = {} if settings.get("commit_rule") == "top_k" else {"commit_threshold": 0.4}
    config = DecodeConfig(**({"max_new_tokens": 12} | threshold | settings))
    denoiser = tiny_denoiser(shifted=shifted)
    return Decoder(denoiser, load_retriever(corpus_file, top_k=top_k), tokenizer, config, layout)


def tokens_of(rollout):
    return [[(c.position, c.token_id) for c in step.committed] for step in rollout.steps]


def rollout_record(rollout):
    return tokens_of(rollout), [(s.query, s.passage_ids, s.retrieved) for s in rollout.steps]


def rollout_records(rollouts):
    return [rollout_record(rollout) for rollout in rollouts]


class CountingRetriever(CorpusRetriever):
    """Finds the same passages for everything and counts the queries."""

    def __init__(self, corpus, top_k=2):
        super().__init__(corpus, top_k)
        self.asked = []

    def rank(self, queries, depth):
        self.asked += [query.text for query in queries]
        return [list(range(min(depth, len(self.corpus)))) for _ in queries]

    def key(self, query):
        return query.text


def bias_end_token(decoder, bias):
    """Makes the end token (257) so much more likely everywhere."""
    plain = decoder.denoiser.compute_token_logits

    def read_out(hidden):
        logits = plain(hidden)
        logits[:, 257] += bias
        return logits

    decoder.denoiser.compute_token_logits = read_out
    return decoder
