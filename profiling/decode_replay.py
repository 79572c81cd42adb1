"""Models that are only measured: the published algorithm done plainly, and recorded decodes run again.

The tokens that a denoiser of random weights proposes mean nothing; what a step costs depends only on which
positions are masked and which passages are new. Both are taken from recorded rollouts.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dlm_rag.cli import print_note
from dlm_rag.commands.prepare_decoder import PreparedDecoder
from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.config.fields import replace_settings
from dlm_rag.decode.rollout import Rollout
from dlm_rag.engine.engine import Decoder
from dlm_rag.engine.rules import Proposals
from dlm_rag.engine.runner import (
    MaskedModelRunner,
    ModelRunner,
    bar_tokens,
    collect_sampling_arrays,
    gather_proposals,
    list_excluded_ids,
    sample_proposals,
)
from dlm_rag.errors import ConfigError
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.denoiser_config import DenoiserConfig
from dlm_rag.model.packed_batch import (
    LaidOutRow,
    RowInput,
    SharedContext,
    make_consecutive_ranges,
    pack_rows,
    to_device,
)
from dlm_rag.nvtx_ranges import profile_stage
from dlm_rag.questions import Question
from dlm_rag.retrieval.base import CorpusRetriever, Query, Ranking
from dlm_rag.text import normalize_whitespace
from dlm_rag.tokenizer import Prompt
from dlm_rag.tokenizer.prompts import PromptTemplate

SHAPE_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size",
)  # fmt: skip
RANDOM_MODEL_SHAPES = {
    "100m": (768, 12, 12, 12, 2048, 16_384),
    "1b": (2048, 22, 32, 8, 5632, 32_000),
    "7b": (3584, 28, 28, 4, 18_944, 152_064),  # Dream's
}
PASSAGE_LENGTH, QUESTION_LENGTH, CANVAS_LENGTH = 100, 20, 64
BLOCK_LENGTH = 8  # of the shipped model, whose decodes are replayed
MASK_ID = 0  # of the random denoisers and their tokenizer


def make_random_denoiser(shape: str, device: torch.device, dtype: torch.dtype) -> Denoiser:
    """A denoiser of a shape in `RANDOM_MODEL_SHAPES` with random weights."""
    sizes: dict[str, Any] = dict(zip(SHAPE_FIELDS, RANDOM_MODEL_SHAPES[shape], strict=True))
    sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    lengths: dict[str, Any] = {"passage_length": PASSAGE_LENGTH, "canvas_length": CANVAS_LENGTH}
    config = DenoiserConfig(mask_token_id=MASK_ID, **sizes, **lengths)
    with torch.device(device):
        denoiser = Denoiser(config).eval()
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(dtype)  # the rotary frequencies stay in float32
    return denoiser


class ReferenceModelRunner(ModelRunner):
    """The published algorithm as it is: the whole model over everything, logits at every position."""

    denoiser: Denoiser

    def __init__(self, denoiser: Denoiser, mask_id: int) -> None:
        self.denoiser = denoiser
        self._excluded_ids = list_excluded_ids(denoiser, mask_id)

    @torch.inference_mode()
    def propose(self, views: Sequence[RowInput]) -> Callable[[], list[Proposals]]:
        shifted = self.denoiser.config.shifted
        states = [
            view.laid_out_prompt.build_row(view.canvas.tolist(), view.finished_length, shifted)
            for view in views
        ]
        with profile_stage("encode_evidence"):
            contexts = self._contexts(states)
        found = []
        with profile_stage("denoise"):
            packed = pack_rows(
                [row.canvas_segment for row in states], self.denoiser.device, context=contexts
            )
            whole = self.denoiser.compute_token_logits(self.denoiser.encode(packed)[0]).float()
            for view, row, every in zip(views, states, whole.split(packed.lengths), strict=True):
                at = torch.tensor([row.find_state(n) for n in view.positions.tolist()]).to(every.device)
                arrays, flags = collect_sampling_arrays([view])
                numbers, *bars = to_device(arrays, every.device)
                logits = bar_tokens(every[at], 0, [*arrays[1:2], *bars])
                proposals = sample_proposals(logits, self._excluded_ids, numbers, *flags)
                found += gather_proposals([view], [proposals])()
        return lambda: found

    def _contexts(self, states: Sequence[LaidOutRow]) -> SharedContext | None:
        """Keys and values of every segment of every row, each through the whole of every layer."""
        segments = [segment for row in states for segment in row.context_segments]
        if not segments:
            return None
        rows = pack_rows(segments, self.denoiser.device)
        places = iter(make_consecutive_ranges(rows.lengths))
        seen = [[next(places) for _ in row.context_segments] for row in states]
        return SharedContext(self.denoiser.encode(rows, keep=True)[1], seen)


class ReplayTokenizer:
    """Random ids for every text, as many for each passage and for each question."""

    mask_id, end_ids, special_ids = MASK_ID, frozenset({1}), frozenset({MASK_ID, 1})
    template = PromptTemplate(fact="{passage}")

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._kept: dict[str, tuple[int, ...]] = {}

    def build_prompt(self, question: str, passages: list[str], system: str = "") -> Prompt:
        facts = tuple(self._ids(passage, PASSAGE_LENGTH) for passage in passages)
        return Prompt(self._ids(question, QUESTION_LENGTH), facts, ())

    def encode(self, text: str) -> tuple[int, ...]:
        return self._ids(text, PASSAGE_LENGTH)

    def _ids(self, text: str, length: int) -> tuple[int, ...]:
        if text not in self._kept:
            rng = np.random.default_rng(list(text.encode()))
            self._kept[text] = tuple(rng.integers(2, self._vocabulary, length).tolist())
        return self._kept[text]

    def query_text(self, ids: list[int]) -> str:
        return ""

    def token_text(self, token: int) -> str:
        return ""

    def decode_with_offsets(self, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
        return "", [(0, 0)] * len(ids)


class ReplayRetriever(CorpusRetriever):
    """Finds for each question what its recorded decode had found, search by search."""

    def __init__(self, recorded_with: CorpusRetriever, recorded: Mapping[str, Rollout]) -> None:
        super().__init__(recorded_with.corpus, recorded_with.top_k)
        rows = {passage.id: row for row, passage in enumerate(recorded_with.corpus)}
        self._plan = {
            normalize_whitespace(rollout.question): [
                [rows[found] for found in step.passage_ids] for step in rollout.steps
            ]
            for rollout in recorded.values()
        }
        self._searches: Counter[str] = Counter()  # by question

    def key(self, query: Query) -> Any:
        return object()  # every search is made

    def rank(self, queries: Sequence[Query], depth: int) -> list[Ranking]:
        found = []
        for query in queries:
            plan, number = self._plan[query.parts[0]], self._searches[query.parts[0]]
            found.append(plan[number % len(plan)])  # a question may be decoded again
            self._searches[query.parts[0]] += 1
        return found


class ReplayModelRunner:
    """Runs a model, and is then sure of what a recorded decode committed next, and of nothing else."""

    def __init__(self, inner: Any, recorded: Mapping[str, Rollout], tokenizer: ReplayTokenizer) -> None:
        self.inner = inner
        self._recorded = {tokenizer.build_prompt(r.question, []).head: r for r in recorded.values()}

    def propose(self, views: Sequence[RowInput]) -> Callable[[], list[Proposals]]:
        wait = self.inner.propose(views)

        def finish() -> list[Proposals]:
            wait()
            return [self._proposals(view) for view in views]

        return finish

    def _proposals(self, view: RowInput) -> Proposals:
        laid = view.laid_out_prompt
        held = (laid.canvas_prefix, *laid.context_segments)
        asked = (segment.ids[:QUESTION_LENGTH] for segment in held)
        steps = next(self._recorded[ids] for ids in asked if ids in self._recorded).steps
        done = accumulate(len(step.committed) for step in steps)
        now = list(done).index(int(np.count_nonzero(view.canvas != MASK_ID))) + 1
        tokens = {c.position: c.token_id for c in steps[now].committed}
        places = view.positions.tolist()
        sure = np.array([float(place in tokens) for place in places])
        ids = np.array([tokens.get(place, 2) for place in places])
        none = dict.fromkeys(("log_prob", "entropy", "margin"), np.zeros(len(places)))
        return Proposals.from_arrays(positions=view.positions, token_ids=ids, confidence=sure, **none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def require_masked_denoiser(decoder: Decoder) -> Denoiser:
    """The denoiser of a decoder; raises `ConfigError` for one of uniform noise, which counts no work."""
    if not isinstance(decoder.denoiser, Denoiser):
        raise ConfigError("this measures models that denoise from masks: name one with --model")
    return decoder.denoiser


class DecoderSource(NamedTuple):
    """A denoiser and how decoders of it are made, by layout, what is done, and how (None: plainly).

    A last argument is the order of finished blocks, for attention in blocks like those of commits.
    """

    denoiser: Denoiser
    decode: DecodeConfig
    make: Callable[..., Decoder]


def open_checkpoint_source(prepared: PreparedDecoder) -> DecoderSource:
    """The denoiser of a checkpoint."""
    denoiser = require_masked_denoiser(prepared.load())
    retriever, tokenizer = prepared.retriever, prepared.tokenizer

    def make(layout: str, decode: DecodeConfig, engine: EngineConfig | None) -> Decoder:
        used = copy.deepcopy(denoiser) if engine is not None and engine.compile else denoiser
        kept = engine or EngineConfig(prefix_cache_gib=0.0)
        decoder = Decoder(used, retriever, tokenizer, decode, layout, kept)
        if engine is None:
            plain: Any = ReferenceModelRunner(used, tokenizer.mask_id)
            decoder.model_runner = plain
        return decoder

    return DecoderSource(denoiser, prepared.config.decode, make)


def open_replay_source(prepared: PreparedDecoder, questions: list[Question], shape: str) -> DecoderSource:
    """Random weights of a shape in `RANDOM_MODEL_SHAPES` that follow decodes of the checkpoint."""
    decode = replace_settings(prepared.config.decode, max_new_tokens=CANVAS_LENGTH, blocks_at_once=1)
    recorder = replace(prepared, config=replace(prepared.config, decode=decode)).load()
    recorded = {rollout.id: rollout for rollout in recorder.stream(questions)}
    random = make_random_denoiser(shape, recorder.denoiser.device, recorder.denoiser.dtype)
    print_note(f"{shape}: {sum(p.numel() for p in random.parameters()) / 1e6:.0f} M parameters")
    corpus: Any = prepared.retriever

    def make(
        layout: str, decode: DecodeConfig, engine: EngineConfig | None, order: str | None = None
    ) -> Decoder:
        denoiser, tokenizer = random, ReplayTokenizer(random.config.vocab_size)
        if order is not None:
            denoiser = copy.copy(random)  # the same weights
            block = decode.block_length or BLOCK_LENGTH
            denoiser.config = replace(random.config, block_size=block, finished_block_context=order)
        kept, typed = engine or EngineConfig(prefix_cache_gib=0.0), cast(Any, tokenizer)
        decoder = Decoder(denoiser, ReplayRetriever(corpus, recorded), typed, decode, layout, kept)
        inner = ReferenceModelRunner(denoiser, MASK_ID) if engine is None else decoder.model_runner
        decoder.model_runner = cast(Any, ReplayModelRunner(inner, recorded, tokenizer))
        return decoder

    # The shipped model attends in blocks, the shape does not.
    return DecoderSource(random, replace(decode, finished_block_context=None), make)


def select_evenly(questions: list[Question], count: int) -> list[Question]:
    """`count` questions from all over the file."""
    count = min(count, len(questions))
    return [questions[n * len(questions) // count] for n in range(count)]


def committed_tokens_by_step(rollout: Rollout) -> list[list[tuple[int, int]]]:
    return [[(c.position, c.token_id) for c in step.committed] for step in rollout.steps]


def find_caching_runner(decoder: Decoder) -> MaskedModelRunner | None:
    """What keeps keys and values for a decoder; None where nothing does."""
    proposer: Any = decoder.model_runner
    inner = getattr(proposer, "inner", proposer)
    return inner if isinstance(inner, MaskedModelRunner) else None
