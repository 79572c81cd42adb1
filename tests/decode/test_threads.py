"""One decoder in several threads: each question gets the answer that it gets alone."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import torch

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
    threads, fork = torch.get_num_threads(), multiprocessing.get_context("fork")
    torch.set_num_threads(2)
    try:
        decoder.ask(questions[0])
        child = fork.Process(target=decoder.ask, args=(questions[0],))
        child.start()
        child.join(60)
        child.kill()
        assert child.exitcode == 0, "a fork has not the threads of its parent"
    finally:
        torch.set_num_threads(threads)
