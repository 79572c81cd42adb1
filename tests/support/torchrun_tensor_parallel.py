"""Run under torchrun by test_tensor_parallel.py: decoding on all ranks, held against one process.

torchrun --nproc-per-node 2 -m tests.support.torchrun_tensor_parallel FOLDER [GOLDEN]
"""

import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dlm_rag.cli import exit_rank
from dlm_rag.config import EngineConfig
from dlm_rag.decode.model_runner import MaskedModelRunner
from dlm_rag.decode.tensor_parallel import LeadingModelRunner, follow_rank_0, load_on_all_ranks
from dlm_rag.errors import RunError
from dlm_rag.model.checkpoint import Checkpoint, open_checkpoint
from dlm_rag.model.tensor_parallel import get_tensor_parallel, split_checkpoint
from dlm_rag.retrieval.corpus import open_corpus
from tests.golden import test_block_golden
from tests.support import golden_traces
from tests.support.attention import shared_segments
from tests.support.decoding import QUESTIONS, rollout_records
from tests.support.processes import wait_until
from tests.support.setup_matrix import DECODING_SETUPS, make_setup_decoder

CPU = torch.device("cpu")
# Of the ways of decoding, those whose pools differ, and of the published systems one of each model.
POOLED = ("prefix", "independent", "experts", "blocks, text", "pipeline")
PUBLISHED = ("sardi", "fast-dllm-llada-none")


class SplitDenoiser:
    """Has `Denoiser.from_pretrained`, on all ranks."""

    @staticmethod
    def from_pretrained(path, device="cpu"):
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        own = split_checkpoint(checkpoint, 0, get_tensor_parallel().size)
        return load_on_all_ranks(own, torch.device(device), torch.float32, "auto")


def decode_setup(folder, way, split=False, **engine):
    """Its rollouts, and its decoder."""
    place = folder / way

    def write_and_split(denoiser):
        if split and not place.exists():  # else an earlier denoiser may still read it
            denoiser.save_pretrained(place)
        return SplitDenoiser.from_pretrained(place) if split else denoiser

    decoder = make_setup_decoder(folder / "corpus.jsonl", way, write_and_split)
    if engine:
        runner = LeadingModelRunner if split else MaskedModelRunner
        how = EngineConfig(prefix_cache_gib=1.0, **engine)
        decoder.model_runner = runner(decoder.denoiser, decoder.tokenizer.mask_id, how)
    return decoder.decode(QUESTIONS * 2), decoder


def compare(whole, split):
    """Whether the tokens are the same, and the largest difference of a log-probability."""
    committed = [
        [token.log_prob for rollout in found for step in rollout.steps for token in step.committed]
        for found in (whole, split)
    ]
    apart = max((abs(a - b) for a, b in zip(*committed, strict=False)), default=0.0)
    return {"same": rollout_records(whole) == rollout_records(split), "apart": apart}


def compare_setups(folder, ways=DECODING_SETUPS, **engine):
    """Every way of decoding; and the bytes of a pool of all heads and of half of them."""
    found = {}
    for way in ways:
        whole, plain = decode_setup(folder, way, **engine)
        split, decoder = decode_setup(folder, way, True, **engine)
        found[way] = compare(whole, split)
        if engine:
            runners = plain.model_runner, decoder.model_runner
            found[way]["pools"] = [runner.pool.used_bytes[0] for runner in runners]
    return found


def list_entries(store):
    return {*store.glob("*/*.safetensors")}


def compare_with_store(folder):
    """With a store that is filled, then read, then lacks what one of the ranks has put there."""
    store = folder / "store"
    engine = {"store": str(store)}
    whole, _ = decode_setup(folder, "shifted")
    found = {}
    for name in ("filled", "read", "damaged"):
        split, decoder = decode_setup(folder, "shifted", True, **engine)
        runner = decoder.model_runner
        runner.pool.store.flush()
        own = {runner.pool.store.path(segment) for segment in runner.pool._near.kept}
        wait_until(lambda own=own: len(list_entries(store)) == 2 * len(own), seconds=30)
        counts = {"read": runner.cache_stats.store_segments, "encoded": runner.cache_stats.encoded_segments}
        found[name] = compare(whole, split) | counts
        if name == "read":
            for path in list_entries(store) - own:  # of the other rank
                path.unlink()
    return found


def compare_golden(folder, golden):
    """The golden traces that are in the repository, and those of the published systems."""
    patches = [mock.patch.object(test_block_golden, "Denoiser", SplitDenoiser)]
    patches.append(mock.patch.object(golden_traces, "Denoiser", SplitDenoiser))
    corpus, checked = open_corpus(folder / "corpus.jsonl"), []
    with patches[0], patches[1]:
        for name in test_block_golden.TRACES:
            (place := folder / f"golden {name}").mkdir()
            test_block_golden.test_every_step_is_the_public_one(place, corpus, name, 8, None)
            checked.append(name)
        for name in PUBLISHED if golden else ():
            golden_traces.check_trace(golden, name)
            checked.append(name)
    return checked


def refuse_what_does_not_fit(folder):
    """What no rank can run ends no rank: the next call is made by all."""
    _, decoder = decode_setup(folder, "independent", True)
    failed = []
    for gib in (1e-6, 1.0):
        engine = EngineConfig(prefix_cache_gib=gib)
        decoder.model_runner = LeadingModelRunner(decoder.denoiser, decoder.tokenizer.mask_id, engine)
        try:
            decoder.decode(QUESTIONS)
        except RunError as error:
            failed.append(str(error))
    return failed


def main() -> None:
    folder, golden = Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, digest, propose = get_tensor_parallel(), hashlib.sha256(), MaskedModelRunner.propose

    def record(self, views):
        found = propose(self, views)
        if self.denoiser.tensor_parallel is not None:
            for proposals in found:
                digest.update(proposals.token_ids.tobytes() + proposals.log_prob.tobytes())
        return found

    parts = {
        "setups": lambda: compare_setups(folder),
        "int8": lambda: compare_setups(folder, POOLED, cache_dtype="int8"),
        "store": lambda: compare_with_store(folder),
        "golden": lambda: compare_golden(folder, golden),
    }
    shared = {
        "setups, shared segments": lambda: compare_setups(folder, POOLED, cache_dtype="auto"),
        "what does not fit": lambda: refuse_what_does_not_fit(folder),
    }
    found = {}
    with mock.patch.object(MaskedModelRunner, "propose", record):
        for group, surroundings in ((parts, nullcontext()), (shared, shared_segments())):
            with surroundings:
                if ranks.rank:
                    follow_rank_0(ranks, CPU)
                else:
                    found |= {name: part() for name, part in group.items()}
                    ranks.broadcast([])
    (folder / f"rank-{ranks.rank}").write_text(digest.hexdigest())
    if not ranks.rank:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    exit_rank()


if __name__ == "__main__":
    main()
