"""One decoder in several threads: each question gets the answer that it gets alone."""

from concurrent.futures import ThreadPoolExecutor

from dlm_rag.config import DecodeConfig
from dlm_rag.engine.engine import Decoder
from tests.support.gemma_decoding import QueryHashRetriever
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer


def test_threads_share_a_decoder(corpus):
    settings = DecodeConfig(max_new_tokens=16, commit_threshold=0.1, batch_size=2)
    decoder = Decoder(tiny_denoiser(), QueryHashRetriever(corpus, 2), tiny_tokenizer(), settings)
    questions = [f"who is number {n}" for n in range(8)]
    alone = {question: decoder.decode([question])[0].response for question in questions}
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda question: decoder.decode([question])[0], questions * 3))
    assert [r.response for r in together] == [alone[r.question] for r in together]
    assert not any(r.error for r in together)
