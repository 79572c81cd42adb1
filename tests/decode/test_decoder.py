"""The loop: the same tokens alone and together, and what it promises about evidence and queries."""

import math
from dataclasses import replace

import pytest
import torch

from dlm_rag import Decoder, load_retriever
from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.engine.engine import resolve_settings
from dlm_rag.engine.runner import MaskedModelRunner, gather_proposals, sample_proposals
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import HybridRetriever, Query
from dlm_rag.retrieval.corpus import Passage
from dlm_rag.tokenizer.prompts import PromptTemplate
from tests.support.decoding import (
    LAYOUTS,
    QUESTIONS,
    CountingRetriever,
    bias_end_token,
    make_decoder,
    rollout_records,
    tokens_of,
)
from tests.support.retrievers import make_letter_retriever
from tests.support.tiny_models import tiny_denoiser, tiny_tokenizer


def wanted(count, mask_id, temperature=None, uniform=None, spread=False):
    """What is wanted of all positions alike."""
    numbers = torch.zeros(6, count, dtype=torch.float64)
    if temperature is not None:
        numbers[:2] = torch.stack((temperature, uniform))
    return torch.tensor([mask_id]), numbers, spread, temperature is not None, False


WAYS = {  # of doing the same work
    "alone": {"batch_size": 1},
    "pipeline": {"overlap": "pipeline"},
    "pipeline, alone": {"overlap": "pipeline", "batch_size": 1},
    "no pool": {"prefix_cache_gib": 0},
    "a pool too small": {"prefix_cache_gib": 1e-5},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_the_work_is_done_changes_no_token(corpus_file, layout, shifted, way):
    together = make_decoder(corpus_file, layout, shifted=shifted, batch_size=3).decode(QUESTIONS)
    settings = {name: value for name, value in WAYS[way].items() if not name.endswith("_gib")}
    other = make_decoder(corpus_file, layout, shifted=shifted, **({"batch_size": 2} | settings))
    if engine := WAYS[way].keys() - settings.keys():
        engine = EngineConfig(**{name: WAYS[way][name] for name in engine})
        other.model_runner = MaskedModelRunner(other.denoiser, 256, engine)
    assert rollout_records(other.decode(QUESTIONS)) == rollout_records(together)
    assert len({r.forwards for r in together}) > 1, "rows should finish at different steps"


class RotatingRetriever(CountingRetriever):
    """Finds other passages at every search."""

    def rank(self, queries, depth):
        self.asked += [query.text for query in queries]
        return [[len(self.asked) % len(self.corpus)] for _ in queries]


def test_steps_ask_with_what_is_written_and_never_change_it(corpus):
    """Step 0 asks with the question alone; each later step commits, whatever the evidence is by then."""
    config = DecodeConfig(max_new_tokens=12, early_stopping=False)
    decoder = Decoder(tiny_denoiser(), RotatingRetriever(corpus), tiny_tokenizer(), config)
    rollout = decoder.decode(["Dune?"])[0]
    first = rollout.steps[0]
    assert (first.query, first.retrieved, first.committed) == ("Dune?", True, ())
    assert sorted(c.position for step in rollout.steps for c in step.committed) == list(range(12))
    assert all(step.committed for step in rollout.steps[1:]), "at least one position per step"
    assert len({step.passage_ids for step in rollout.steps}) > 2
    before = {}
    for state in rollout.replay():
        assert all(state[position] == token for position, token in before.items())
        before = state


def test_an_unchanged_query_costs_no_retrieval(corpus):
    retriever, config = CountingRetriever(corpus), DecodeConfig(max_new_tokens=8, query_policy="question")
    decoder = Decoder(tiny_denoiser(), retriever, tiny_tokenizer(), config)
    rollout = decoder.decode(["Who wrote Emma?"])[0]
    assert retriever.asked == ["Who wrote Emma?"] and rollout.retrievals == 1
    assert [step.retrieved for step in rollout.steps] == [True] + [False] * rollout.forwards
    assert all(step.query == "Who wrote Emma?" for step in rollout.steps)


@pytest.mark.parametrize("overlap", ["none", "pipeline"])
@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_two_rounds_merge_what_two_searches_find(corpus_file, kind, overlap):
    """Against the same two searches by hand, whose results are dealt one at a time."""
    retriever = load_retriever(corpus_file, top_k=3)
    if kind != "bm25":
        dense = make_letter_retriever(retriever.corpus, 3)
        retriever = dense if kind == "dense" else HybridRetriever([retriever, dense], 3, fusion_depth=4)
    asked = "Which village born in Tacoma?"
    (first,) = retriever.search([Query(asked, (asked,))])
    title, contents = first[0].text.split("\n")
    longer = " ".join(dict.fromkeys(f"{title} {contents}".split()))
    (second,) = retriever.search([Query(f"{asked} {longer}", (asked, title, contents))])
    dealt = []
    for one, other in zip(first, second, strict=True):
        dealt += [one.id, other.id]
    dealt = tuple(dict.fromkeys(dealt))[:3]
    assert dealt not in (tuple(p.id for p in first), tuple(p.id for p in second)), "else nothing is merged"

    config = DecodeConfig(
        max_new_tokens=12, query_policy="two_rounds", early_stopping=False, overlap=overlap
    )
    steps = Decoder(tiny_denoiser(), retriever, tiny_tokenizer(), config).decode([asked])[0].steps
    found = [(step.query, step.retrieved) for step in steps[:3]]
    assert found == [(asked, True), (f"{asked} {longer}", True), (f"{asked} {longer}", False)]
    assert steps[0].passage_ids == tuple(p.id for p in first)
    assert all(step.passage_ids == dealt for step in steps[1:])


class Fragile(CountingRetriever):
    """Fails for every batch that holds a query about Emma."""

    def rank(self, queries, depth):
        if any("Emma" in query.text for query in queries):
            raise RuntimeError("the disk is gone")
        return super().rank(queries, depth)


@pytest.mark.parametrize("overlap", ["none", "pipeline"])
def test_a_failing_search_ends_its_row_and_no_other(corpus, overlap):
    config = DecodeConfig(max_new_tokens=8, batch_size=3, overlap=overlap)
    decoder, healthy = (
        Decoder(tiny_denoiser(), kind(corpus), tiny_tokenizer(), config)
        for kind in (Fragile, CountingRetriever)
    )
    found, expected = decoder.decode(QUESTIONS), healthy.decode(QUESTIONS)
    assert found[0].error == "the search failed: RuntimeError: the disk is gone" and found[0].finished
    assert found[0].to_dict()["error"] and not found[0].response
    assert rollout_records(found[1:]) == rollout_records(expected[1:])


@pytest.mark.parametrize("nonsense", [None, "text", [{"id": "a"}], [Passage("a", "", 3)]])
def test_what_is_no_list_of_passages_ends_its_row_and_no_other(corpus, nonsense):
    class Odd(CountingRetriever):
        def search(self, queries):
            found = super().search(queries)
            return [nonsense if q.text == QUESTIONS[1] else f for q, f in zip(queries, found, strict=True)]

    decoder = Decoder(tiny_denoiser(), Odd(corpus), tiny_tokenizer(), DecodeConfig(overlap="pipeline"))
    assert [bool(r.error) for r in decoder.decode(QUESTIONS)] == [False, True, False]


@pytest.mark.parametrize(
    ("question", "error"), [("Who is ~?", "is not a number"), ("Why? " * 1000, "tokens too long")]
)
def test_what_goes_wrong_in_a_row_ends_that_row_alone(corpus_file, question, error):
    decoder = make_decoder(corpus_file, batch_size=3)
    expected = rollout_records(decoder.decode(QUESTIONS))
    decoder.denoiser.embed_tokens.weight.data[ord("~")].fill_(math.nan)
    found = decoder.decode([*QUESTIONS, question])
    assert error in found[3].error and found[3].finished
    assert rollout_records(found[:3]) == expected


@pytest.mark.parametrize(
    ("asked", "says"),
    [(["Dune?", " "], "question 2 is blank"), ([Question("a", "x"), Question("a", "y")], "same id")],
)
def test_what_is_no_list_of_questions_is_refused(corpus_file, asked, says):
    with pytest.raises(QuestionError, match=says):
        make_decoder(corpus_file).decode(asked)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopping_early_saves_forwards_and_changes_no_text(corpus_file, layout):
    settings = {"max_new_tokens": 24, "commit_rule": "top_k", "block_length": 4, "query_policy": "question"}
    whole = bias_end_token(make_decoder(corpus_file, layout, early_stopping=False, **settings), 8.0)
    early = bias_end_token(make_decoder(corpus_file, layout, **settings), 8.0)
    for long, short in zip(whole.decode(QUESTIONS), early.decode(QUESTIONS), strict=True):
        assert short.response == long.response
        assert tokens_of(short) == tokens_of(long)[: len(short.steps)]
        assert short.forwards < long.forwards == 24


def test_retrieval_waits_for_its_turn(corpus):
    """No query is written where no refresh was due."""
    config = DecodeConfig(max_new_tokens=6, commit_rule="top_k", retrieval_interval=3)
    decoder = Decoder(tiny_denoiser(), PlannedRetriever(corpus, [[0]] * 9), tiny_tokenizer(), config)
    script(decoder, [dict(enumerate("abcdef"))], 9.0)
    steps = decoder.decode(["Who?"])[0].steps
    assert [step.step for step in steps if step.query is not None] == [0, 3, 6]


class Scripted:
    """A proposer that proposes the characters of steps[n] at step n + 1, with logits of `strength`."""

    def __init__(self, shape, steps, strength):
        self.shape, self._strength = shape, strength
        self._turn = iter([*steps, *[steps[-1]] * 99])

    def propose(self, views):
        (view,) = views
        logits = torch.zeros(len(view.canvas), 258)
        for place, character in next(self._turn).items():
            logits[place, ord(character)] = self._strength
        found = sample_proposals(logits[view.positions], *wanted(len(view.positions), 256, spread=True))
        return gather_proposals(views, [found])

    def order_passages(self, before, found):
        return found

    def release(self, slot):
        pass


def script(decoder, steps, strength=20.0):
    """The model then proposes the bytes of `steps[n]` (position -> character) at step n + 1."""
    decoder.model_runner = Scripted(decoder.denoiser.config, steps, strength)


def test_sampling_depends_on_seed_and_question_not_on_the_batch(corpus_file):
    settings = {"temperature": 1.0, "early_stopping": False}
    batch = make_decoder(corpus_file, batch_size=3, **settings).decode(QUESTIONS)
    single = make_decoder(corpus_file, batch_size=1, **settings)
    asked = [Question(f"q{n}", text) for n, text in enumerate(QUESTIONS, start=1)]
    assert [tokens_of(r) for r in single.stream(asked)] == [tokens_of(r) for r in batch]
    other = make_decoder(corpus_file, seed=1, **settings).decode(QUESTIONS)
    assert [tokens_of(r) for r in other] != [tokens_of(r) for r in batch]


def test_proposals_by_hand():
    """Probabilities 0.5, 0.3, 0.2: confidence 0.5, margin 0.2, entropy 1.0297 nats."""
    logits = torch.tensor([[0.3, 0.5, 0.2, 1e-30]]).log()
    asked = wanted(1, 3, spread=True)
    token, confidence, log_prob, entropy, margin = sample_proposals(logits, *asked).values()
    assert token == 1
    assert confidence == pytest.approx(0.5) and margin == pytest.approx(0.2)
    assert entropy == pytest.approx(-(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2)))
    assert log_prob == pytest.approx(math.log(0.5))


def test_proposals_of_random_logits():
    """Log-probabilities are those of the proposed tokens, finite where the probability underflows; a tiny
    temperature is none.
    """
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) * 9
    uniform = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    greedy = sample_proposals(logits, *wanted(50, 19))
    for temperature in (1e-40, 1e9):
        tempered = torch.full((50,), temperature, dtype=torch.float64)
        found = sample_proposals(logits, *wanted(50, 19, tempered, uniform))
        tokens, confidence, log_prob, *_ = found.values()
        expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(log_prob.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(confidence.log(), log_prob, rtol=1e-5, atol=1e-6)
        assert (tokens == greedy["token_ids"]).all() == (temperature < 1)
    sure = torch.tensor([[200.0, 0.0, 0.0]])
    high, last = torch.tensor([1e9], dtype=torch.float64), torch.tensor([1.0 - 1e-9], dtype=torch.float64)
    token, confidence, log_prob, *_ = sample_proposals(sure, *wanted(1, 2, high, last)).values()
    assert (token, confidence) == (1, 0.0) and log_prob == pytest.approx(-200.0)


def test_sampled_tokens_follow_the_tempered_distribution():
    """At temperature 2 the probabilities are proportional to the square roots."""
    logits = torch.tensor([0.64, 0.32, 0.04, 1e-30]).log().expand(30000, 4)
    uniform = torch.rand(30000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tempered = torch.full((30000,), 2.0, dtype=torch.float64)
    asked = wanted(30000, 3, tempered, uniform)
    token, confidence, *_ = (found.numpy() for found in sample_proposals(logits, *asked).values())
    roots = torch.tensor([0.64, 0.32, 0.04]).sqrt()
    shares = torch.bincount(torch.from_numpy(token).long(), minlength=3) / 30000
    torch.testing.assert_close(shares, roots / roots.sum(), atol=0.01, rtol=0)
    assert confidence[token == 1] == pytest.approx(0.32), "confidence is the untempered probability"


class PlannedRetriever(CountingRetriever):
    """Finds the rows of a plan, search by search."""

    def __init__(self, corpus, plan):
        super().__init__(corpus)
        self.plan = iter(plan)

    def rank(self, queries, depth):
        return [next(self.plan) for _ in queries]

    def key(self, query):
        return object()


def test_a_decoded_rollout_is_cited_from_what_was_in_context_at_each_word(corpus):
    """ "Emma " at step 1 with Emma's passage in context, "Dune" at step 2 with Steventon's instead."""
    config = DecodeConfig(max_new_tokens=10, commit_threshold=0.9, early_stopping=False)
    decoder = Decoder(tiny_denoiser(), PlannedRetriever(corpus, [[0], [2], [3]]), tiny_tokenizer(), config)
    text = " Emma Dune"
    script(decoder, [dict(enumerate(text[:6])), {n: text[n] for n in range(6, 10)}])
    rollout = decoder.decode(["Which books?"])[0]
    assert rollout.response == "Emma Dune"
    assert [step.passage_ids[0] for step in rollout.steps] == ["emma", "steventon", "dune"]
    (unit,) = rollout.citations
    assert unit["passages"] == [{"id": "emma", "step": 1, "words": ["emma"]}]
    assert unit["unsupported"] == ["dune"], "its passage was found only after the word was written"


def test_what_was_cut_from_the_prompt_is_no_evidence(corpus):
    """With room for 12 tokens of a passage, "Jane" and all behind it was never read."""
    denoiser = tiny_denoiser(passage_length=12)
    config = DecodeConfig(max_new_tokens=9, commit_threshold=0.5)
    tokenizer = tiny_tokenizer(PromptTemplate(head="{question}\n", fact="{passage}"))
    decoder = Decoder(denoiser, CountingRetriever(corpus, 1), tokenizer, config, "independent")
    script(decoder, [dict(enumerate("Emma Jane"))])
    rollout = decoder.decode(["Who?"])[0]
    assert rollout.evidence_texts["emma"] == "Emma\nEmma is"
    assert rollout.citations[0]["unsupported"] == ["jane"]


def test_the_mask_is_never_written(corpus_file):
    decoder = make_decoder(corpus_file, early_stopping=False)
    plain = decoder.denoiser.compute_token_logits
    mask = torch.nn.functional.one_hot(torch.tensor(256), 258) * 50.0
    decoder.denoiser.compute_token_logits = lambda hidden: plain(hidden) + mask
    for settings in ({}, {"temperature": 1.0}, {"temperature": 1.0, "commit_rule": "sampled"}):
        decoder.config = DecodeConfig(max_new_tokens=6, early_stopping=False, **settings)
        tokens = [c.token_id for s in decoder.decode(["Dune?"])[0].steps for c in s.committed]
        assert len(tokens) == 6 and 256 not in tokens


def test_lengths_of_canvas_and_blocks_are_the_checkpoints_unless_told_otherwise():
    own = replace(tiny_denoiser().config, canvas_length=24, block_length=8)
    for given, lengths in {
        (): (24, 8),
        (("block_length", 0),): (24, 0),
        (("max_new_tokens", 4),): (4, 4),
        (("max_new_tokens", 96), ("block_length", 16)): (96, 16),
    }.items():
        found = resolve_settings(DecodeConfig(**dict(given)), own)
        assert (found.max_new_tokens, found.block_length) == lengths
    with pytest.raises(ConfigError, match="block_length=5 is longer than max_new_tokens=4"):
        resolve_settings(DecodeConfig(max_new_tokens=4, block_length=5), own)
    in_blocks = replace(own, block_size=16, block_grid="canvas")  # which are written whole
    assert resolve_settings(DecodeConfig(max_new_tokens=4), in_blocks).block_length == 8


@pytest.mark.parametrize("shape", [{}, {"block_size": 16, "block_grid": "canvas"}], ids=str)
@pytest.mark.parametrize("first", [4, 24])
def test_lengths_that_nobody_has_set_are_found_anew_for_every_question(corpus_file, shape, first):
    decoder = make_decoder(corpus_file)
    own = replace(tiny_denoiser(**shape).config, canvas_length=24, block_length=8)
    decoder.denoiser.config = own
    decoder.config = decoder.resolve_settings(DecodeConfig(max_new_tokens=first))
    for length in (24, 6):
        found = decoder.resolve_settings(decoder.config, max_new_tokens=length)
        assert found.block_length == resolve_settings(DecodeConfig(max_new_tokens=length), own).block_length
    found = decoder.resolve_settings(decoder.config, max_new_tokens=24, block_length=4)
    assert decoder.resolve_settings(found, max_new_tokens=8).block_length == 4
