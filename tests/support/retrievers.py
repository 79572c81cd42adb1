"""Retrievers and queries that can be followed by hand."""

import torch

from dlm_rag.retrieval.base import MultiQueryRetriever, Query
from dlm_rag.retrieval.dense import DenseRetriever


def make_query(text, *parts):
    return Query(text, parts or (text,))


def list_passage_ids(found):
    return [[passage.id for passage in passages] for passages in found]


def letters(texts):
    """A stand-in for an encoder: how often each letter occurs, as a unit vector."""
    counts = torch.tensor([[float(text.lower().count(chr(97 + n))) for n in range(26)] for text in texts])
    return torch.nn.functional.normalize(counts)


def make_letter_retriever(corpus, top_k, embed=letters):
    vectors = letters([passage.text for passage in corpus]).numpy()
    return MultiQueryRetriever(DenseRetriever(corpus, top_k, embed, vectors, torch.device("cpu")))
