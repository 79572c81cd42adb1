"""What each mechanism of the decode engine saves, against a plain reference.

    python profiling/bench_decode.py --out runs/decode                    # the shipped model and world
    python profiling/bench_decode.py --out runs/dream --config sardi.yaml --model DIR --corpus FILE \\
        --questions FILE                                                  # a checkpoint of your own
    python profiling/bench_decode.py --out runs/100m --shape 100m         # random weights, recorded steps

The reference is the published algorithm: one question at a time, nothing kept, the whole model at all
positions. Mechanisms are switched on one after another; the exact ones must give its tokens. Settings take
turns on the same questions, each round begins with another one. Times are medians over the rounds with
their range, speed-ups of the ratios within a round. engine.compile=true adds compiled layers. Pools are
emptied before every turn; "store filled" reads what an earlier run has left in files, of the same
questions.

--shape: a denoiser of that size with random weights follows the commits and the evidence of decodes of
the shipped model (canvas 64, 7 passages of 100 tokens), with attention whole and in blocks.
--limit: questions, from all over the file (40). --before: the pool has seen that many other questions,
as in a long run; every round asks new ones. --steady: decoding with all rows filled, as a server under
load has it, of 1, 16 and 64 rows for example. FLOPs and bytes are counted and set against the best of the
device. Writes scores.json, table.md and picture.png into --out.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from bench_tools import (
    TableRow,
    format_markdown_table,
    parse_bench_args,
    plot_bars,
    print_table,
    rotate,
    write_json,
)
from decode_replay import (
    RANDOM_MODEL_SHAPES,
    DecoderSource,
    committed_tokens_by_step,
    find_caching_runner,
    open_checkpoint_source,
    open_replay_source,
    require_masked_denoiser,
    select_evenly,
)
from steady_state import Roofline, measure_roofline, measure_steady

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, gather_questions, prepare_decoder
from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.config.fields import replace_settings
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.terminal import RunTotals
from dlm_rag.energy import open_meter, summarise_energy
from dlm_rag.engine.cache import CacheStats
from dlm_rag.engine.engine import Decoder
from dlm_rag.errors import ConfigError, RunError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.machine import get_peak_memory_bytes
from dlm_rag.model.denoiser import FlopCount
from dlm_rag.nvtx_ranges import drop_nested_stages
from dlm_rag.questions import Question

# What --shape measures: name, layout, order of finished blocks, the ways of `list_ways`.
REPLAYED: tuple[tuple[str, str, str | None, tuple[str, ...]], ...] = (
    ("joint", "joint", None, ("reference", "+ batch")),
    ("independent", "independent", None,
     ("+ masked positions only", "+ evidence pool", "+ batch", "batch, no pool")),
    ("blocks, recompute", "independent", "recompute", ("+ evidence pool", "+ batch")),
    ("blocks, no_evidence", "independent", "no_evidence", ("+ evidence pool", "+ batch")),
)  # fmt: skip
SHOWN = ("setting", "answers/s", "speed-up", "same tokens", "EM %", "forwards", "ms/forward", "reused %")
STEADY_STEPS = 8  # of --steady, a round
INEXACT = ("batch, compiled", "batch, int8")  # which round otherwise
OPTIONS: dict[str, tuple[str | int, str]] = {
    "rounds": (5, "times that every setting has its turn"),
    "before": (0, "questions that every pool has seen before the first round"),
    "only": ("", "settings to be measured, by words in their names, separated by commas (all)"),
    "shape": ("", f"random weights: {', '.join(RANDOM_MODEL_SHAPES)}"),
    "steady": ("", "rows of batches that stay full, as 1,16,64: these alone, 8 steps a round"),
}


class Round(NamedTuple):
    """What a setting did in its turn of a round."""

    seconds: float
    rollouts: list[Rollout]  # in the order of the questions
    reused: float  # share of the context tokens that needed no run
    work: FlopCount
    energy: dict[str, Any] | None


@dataclass
class BenchSetting:
    """A way to decode, and its rounds."""

    name: str
    decoder: Decoder
    exact: bool = True  # whether its tokens must be those of the first setting
    fills_store: bool = False  # whether all questions are asked once before the first round
    rounds: list[Round] = field(default_factory=list)


def main(argv: list[str]) -> None:
    words, out = parse_bench_args(__doc__ or "", argv, OPTIONS)
    config, shape = fill_in_shipped_files(words.config, []), words.options["shape"]
    if config.retrieval.url is not None:
        raise ConfigError("the benchmark replays the passages of a corpus: leave retrieval.url out")
    if shape not in ("", *RANDOM_MODEL_SHAPES):
        raise ConfigError(f"--shape {shape} is not one of {', '.join(RANDOM_MODEL_SHAPES)}")
    limit, rounds, before = config.limit or 40, words.options["rounds"], words.options["before"]
    config = replace(config, out=None, trace=None, limit=None)
    everything = gather_questions(config, [])
    if before and (need := limit * rounds + before) > len(everything):
        raise ConfigError(
            f"--before {before} and {rounds} rounds of --limit {limit} take {need} questions, and there "
            f"are {len(everything)}: lower one of the three"
        )
    asked = select_evenly(everything, limit * rounds if before else limit)
    # With pools that stay full, a question asked twice would find its own evidence.
    turns = [asked[n::rounds] if before else asked for n in range(rounds)]
    earlier = select_evenly([q for q in everything if q not in asked], before)
    prepared = prepare_decoder(config, [*asked, *earlier])
    stamp, gib = prepared.stamp(), config.engine.prefix_cache_gib or 1.0
    if sizes := words.options["steady"]:
        source = open_replay_source(prepared, asked, shape) if shape else open_checkpoint_source(prepared)
        layout = "independent" if shape else prepared.evidence_layout
        measure_full_batches(
            out, stamp, source, layout, (asked, read_sizes(str(sizes)), STEADY_STEPS * rounds)
        )
        return
    if shape:
        source = open_replay_source(prepared, [*asked, *earlier], shape)
        settings = make_replay_settings(source, gib)
    else:
        source = open_checkpoint_source(prepared)
        ways = list_ways(source, prepared.evidence_layout, gib, config.engine.compile, out / "store")
        decoders = {name: source.make(prepared.evidence_layout, *way) for name, way in ways.items()}
        settings = [
            BenchSetting(name, decoder, name not in INEXACT, "store" in name)
            for name, decoder in decoders.items()
        ]
    if chosen := words.options["only"]:
        names = str(chosen).split(",")
        settings = [each for each in settings if any(name in each.name for name in names)]
        if not settings:
            raise ConfigError(f"--only {chosen} is in the name of no setting")
    measure_in_rounds(settings, turns, earlier)
    roofline = measure_roofline(source.denoiser.device, source.denoiser.dtype)
    rows = [summarise_setting(setting, settings[0], turns[-1], roofline) for setting in settings]
    write_decode_report(out, stamp | {"roofline": roofline._asdict()}, rows)
    wrong = [row["setting"] for row in rows if row["exact"] and row["same tokens"] < len(turns[-1])]
    if wrong:
        print_note(f"not the tokens of {settings[0].name} for every question: {', '.join(wrong)}")
        raise SystemExit(1)


def read_sizes(text: str) -> list[int]:
    """The numbers of `--steady`; raises `ConfigError`."""
    if not all(word.isdecimal() and int(word) for word in text.split(",")):
        raise ConfigError(f"--steady {text!r} is to be numbers of rows, as 1,16,64")
    return [int(word) for word in text.split(",")]


def measure_full_batches(
    out: Path, stamp: dict[str, Any], source: DecoderSource, layout: str,
    run: tuple[list[Question], list[int], int],
) -> None:  # fmt: skip
    """Writes the figures of batches that stay full. run: questions, rows of each batch, steps of each."""
    questions, sizes, steps = run
    roofline = measure_roofline(source.denoiser.device, source.denoiser.dtype)
    rows = []
    for size in sizes:
        decoder = source.make(layout, replace_settings(source.decode, batch_size=size), EngineConfig())
        rows.append(measure_steady(decoder, questions, roofline, steps))
    write_json(out / "scores.json", {"stamp": stamp | {"roofline": roofline._asdict()}, "steady": rows})
    print_table(rows)
    write_text_atomic(out / "table.md", format_markdown_table(rows) + "\n")


def list_ways(
    source: DecoderSource,
    layout: str,
    prefix_cache_gib: float,
    compiled: bool = False,
    store: Path | None = None,
) -> dict[str, tuple[DecodeConfig, EngineConfig | None]]:
    """What is done by name, each with one more thing switched on, and how (None: plainly).

    store: the folder of an evidence store, where one is to be measured.
    """
    decode = replace_settings(source.decode, overlap="none", retrieval_interval=1)
    single, batch = replace_settings(decode, batch_size=1), decode
    batch = replace_settings(decode, batch_size=16) if batch.batch_size == 1 else batch
    masked, pool = EngineConfig(prefix_cache_gib=0.0), EngineConfig(prefix_cache_gib=prefix_cache_gib)
    best = masked if layout == "joint" else pool  # joint evidence cannot be shared
    ways: dict[str, tuple[DecodeConfig, EngineConfig | None]] = {
        "reference": (single, None),
        "+ masked positions only": (single, masked),
        "+ evidence pool": (single, pool),
        "+ batch": (batch, best),
        "+ pipeline": (replace_settings(batch, overlap="pipeline"), best),
        "batch, no pool": (batch, masked),
    }
    if compiled:
        ways["batch, compiled"] = (batch, replace(best, compile=True))
    if store is not None and layout != "joint":
        ways["batch, store filled"] = (batch, replace(best, store=str(store)))
        ways["batch, int8"] = (batch, replace(best, cache_dtype="int8"))
    if layout == "joint":
        del ways["+ evidence pool"], ways["batch, no pool"]
    return ways


def make_replay_settings(source: DecoderSource, prefix_cache_gib: float) -> list[BenchSetting]:
    """The settings of `REPLAYED`; random weights have no tokens to be compared."""
    found = []
    for label, layout, order, names in REPLAYED:
        ways = list_ways(source, layout, prefix_cache_gib)
        for name in names:
            decoder = source.make(layout, *ways[name], order)
            found.append(BenchSetting(f"{label}, {name.removeprefix('+ ')}", decoder, exact=False))
    return found


def measure_in_rounds(
    settings: Sequence[BenchSetting], turns: list[list[Question]], earlier: Sequence[Question] = ()
) -> None:
    """Gives every setting its turn in every round, after a warm-up of two questions each.

    turns: what is asked in each round. earlier: what every pool has seen; then it is never emptied.
    """
    for number in range(-1, len(turns)):
        for setting in rotate(settings, max(0, number)):
            runner = find_caching_runner(setting.decoder)
            asked = turns[number] if number >= 0 else [*(earlier or turns[0])]
            if runner is not None and not earlier:
                runner.reset_cache()
            keeps = earlier and runner is not None and runner.cache.budget_tokens
            if number < 0 and not keeps and not setting.fills_store:
                asked = asked[:2]
            found = measure_round(setting.decoder, asked)
            if runner is not None and runner.cache.store is not None:
                runner.cache.store.flush()
            if number >= 0:
                setting.rounds.append(found)
                print_note(
                    f"round {number + 1}, {setting.name}: {len(asked) / found.seconds:.2f} answers/s"
                )


def measure_round(decoder: Decoder, asked: Sequence[Question]) -> Round:
    """Decodes the questions once."""
    runner, denoiser = find_caching_runner(decoder), require_masked_denoiser(decoder)
    work, seen = (
        replace(denoiser.flop_count),
        replace(CacheStats() if runner is None else runner.cache_stats),
    )
    meter = open_meter("auto", [denoiser.device])
    start = time.perf_counter()
    rollouts = {rollout.id: rollout for rollout in decoder.stream(asked)}
    seconds = time.perf_counter() - start
    reading = meter.stop()
    now = seen if runner is None else runner.cache_stats
    requested, encoded = now.requested_tokens, now.encoded_tokens
    reused = CacheStats(requested - seen.requested_tokens, encoded - seen.encoded_tokens).reused_share
    tally = RunTotals()
    for rollout in rollouts.values():
        tally.add(rollout)
    tally.close("", reading)
    if failed := [rollout for rollout in rollouts.values() if rollout.error]:
        raise RunError(f"{len(failed)} of {len(asked)} questions failed: {failed[0].error}")
    answers = [rollouts[question.id] for question in asked]
    return Round(seconds, answers, reused, denoiser.flop_count - work, tally.energy)


def summarise_setting(
    setting: BenchSetting, first: BenchSetting, asked: list[Question], roofline: Roofline
) -> TableRow:
    """The row of a setting; asked: in the last round, which first has answered too."""
    last, seconds = setting.rounds[-1], [each.seconds for each in setting.rounds]
    forwards = sum(rollout.forwards for rollout in last.rollouts)
    stages: Counter[str] = Counter()
    for rollout in (rollout for each in setting.rounds for rollout in each.rollouts):
        stages.update(drop_nested_stages(rollout.seconds))
    pairs = [*zip(last.rollouts, first.rounds[-1].rollouts, strict=True)]
    right = [
        compute_exact_match(rollout.answer, question.golden_answers)
        for rollout, question in zip(last.rollouts, asked, strict=True)
    ]
    shares = [f"{name} {spent / stages.total():.0%}" for name, spent in stages.most_common()]
    return {
        "setting": setting.name,
        "answers/s": [len(asked) / each for each in seconds],
        "speed-up": [a.seconds / b.seconds for a, b in zip(first.rounds, setting.rounds, strict=True)],
        "same tokens": sum(committed_tokens_by_step(a) == committed_tokens_by_step(b) for a, b in pairs),
        "EM %": 100 * float(np.mean(right)),
        "forwards": forwards / len(asked),
        "ms/forward": 1e3 * median(seconds) / forwards,
        "reused %": 100 * last.reused,
        "GFLOP/answer": last.work.flops / 1e9 / len(asked),
        "tokens run": last.work.tokens,
        **roofline.describe(last.work, median(seconds)),
        "stages": ", ".join(shares),
        "exact": setting.exact,
        "energy": summarise_energy([each.energy for each in setting.rounds]),  # of those measured
    }


def write_decode_report(out: Path, stamp: dict[str, Any], rows: list[TableRow]) -> None:
    """The table: on the screen, in Markdown, and all figures in JSON; a picture."""
    write_json(
        out / "scores.json", {"stamp": stamp, "peak_bytes": get_peak_memory_bytes(), "settings": rows}
    )
    print_table(rows, only=SHOWN)
    more = (*SHOWN, "GFLOP/answer", "tokens run", "roofline %", "bound by", "stages")
    origin = f"Commit {stamp['commit']}, {stamp['date']}, {stamp['device']}, {stamp['threads']} threads."
    write_text_atomic(out / "table.md", f"{format_markdown_table(rows, more)}\n\n{origin}\n")
    plot_bars(out / "picture.png", {row["setting"]: row["answers/s"] for row in rows}, "answers a second")


if __name__ == "__main__":
    run_program(main)
