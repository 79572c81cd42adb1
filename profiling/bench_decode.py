"""What each mechanism of the decode engine saves, against a plain reference.

    python profiling/bench_decode.py --out runs/decode                    # the shipped model and world
    python profiling/bench_decode.py --out runs/dream --config sardi.yaml --model DIR --corpus FILE \\
        --questions FILE                                                  # a checkpoint of your own
    python profiling/bench_decode.py --out runs/100m --shape 100m         # random weights, recorded steps

The reference is the published algorithm: one question at a time, nothing kept, the whole model at all
positions. Mechanisms are switched on one after another; the exact ones must give its tokens. Settings take
turns on the same questions, each round begins with another one. Times are medians over the rounds with
their range, speed-ups medians of the ratios within a round. engine.compile=true adds compiled layers.

--shape: a denoiser of that size with random weights follows the commits and the evidence of decodes of
the shipped model (canvas 64, 7 passages of 100 tokens), with attention whole and in blocks.
--limit: questions, from all over the file (40). --before: the pool has seen that many other questions,
as in a long run; every round asks new ones. FLOPs and bytes are counted and set against the best
of the device. Writes scores.json, table.md and picture.png into --out.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_tools import (
    format_markdown_table,
    parse_bench_args,
    print_table,
    rotate,
    save_figure,
    write_json,
)
from decode_replay import (
    RANDOM_MODEL_SHAPES,
    DecodeReplay,
    build_decoder,
    committed_tokens_by_step,
    find_caching_runner,
    require_masked_denoiser,
    select_evenly,
)

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.prepare_decoder import (
    PreparedDecoder,
    apply_shipped_defaults,
    gather_questions,
    prepare_decoder,
)
from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.terminal import RunTotals
from dlm_rag.energy.meter import open_meter, summarise_energy
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.evidence.segment_kv_cache import CacheStats
from dlm_rag.files.paths import write_text_atomic
from dlm_rag.machine import get_peak_memory_bytes
from dlm_rag.model.flops import FlopCount
from dlm_rag.nvtx_ranges import drop_nested_stages
from dlm_rag.questions import Question

# What --shape leaves out: too small to be seen beside a large model, or measured in the other layout.
REPLAY_EXCLUDED = {
    "joint": ("+ pipeline", "+ masked positions only"),
    "independent": ("+ pipeline", "reference"),
}
OPTIONS: dict[str, tuple[str | int, str]] = {
    "rounds": (5, "times that every setting has its turn"),
    "before": (0, "questions that every pool has seen before the first round"),
    "shape": ("", f"random weights: {', '.join(RANDOM_MODEL_SHAPES)}"),
}


@dataclass(frozen=True)
class Roofline:
    """FLOP/s of a large matrix product and bytes/s of a large copy, both ways counted."""

    flops: float
    bytes: float

    def least_seconds(self, work: FlopCount) -> float:
        """The least time for the work, if nothing were lost."""
        return max(work.flops / self.flops, work.bytes_moved / self.bytes)

    def limiting_resource(self, work: FlopCount) -> str:
        """Which of the two it is."""
        return "compute" if work.flops / self.flops > work.bytes_moved / self.bytes else "memory"


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """The best of ten matrix products and ten copies on this device."""
    side, length = (8192, 2**30) if device.type == "cuda" else (2048, 2**27)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(length // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)

    def best(run: Any) -> float:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        return min(times)

    return Roofline(2 * side**3 / best(lambda: a @ b), 2 * length / best(lambda: target.copy_(source)))


@dataclass
class BenchSetting:
    """A way to decode, and what it did in each round."""

    name: str
    decoder: Decoder
    exact: bool = True  # whether its tokens must be those of the first setting
    seconds: list[float] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    stages: Counter[str] = field(default_factory=Counter)
    reuse: float = 0.0
    seen: CacheStats = field(default_factory=CacheStats)  # when the last round began
    work: FlopCount = field(default_factory=FlopCount)  # of the last round
    energy: list[dict[str, Any] | None] = field(default_factory=list)


def main(argv: list[str]) -> None:
    words, out = parse_bench_args(__doc__ or "", argv, OPTIONS)
    config = apply_shipped_defaults(words.config, [])
    if config.retrieval.url is not None:
        raise ConfigError("the benchmark replays the passages of a corpus: leave retrieval.url out")
    if words.options["shape"] not in ("", *RANDOM_MODEL_SHAPES):
        known = ", ".join(RANDOM_MODEL_SHAPES)
        raise ConfigError(f"--shape {words.options['shape']} is not one of {known}")
    limit, rounds, before = config.limit or 40, words.options["rounds"], words.options["before"]
    config = replace(config, out=None, trace=None, limit=None)
    everything = gather_questions(config, [])
    asked = select_evenly(everything, limit * rounds if before else limit)
    # With pools that stay full, a question asked twice would find its own evidence.
    turns = [asked[n::rounds] if before else asked for n in range(rounds)]
    earlier = select_evenly([q for q in everything if q not in asked], before)
    questions = [*asked, *earlier]
    prepared = prepare_decoder(config, questions)
    stamp = prepared.stamp()
    if words.options["shape"]:
        settings = make_replay_settings(prepared, questions, words.options["shape"])
    else:
        settings = make_cumulative_settings(prepared)
    measure_in_rounds(settings, turns, earlier)
    denoiser = settings[0].decoder.denoiser
    lines = summarise_settings(settings, turns, measure_roofline(denoiser.device, denoiser.dtype))
    write_decode_report(out, stamp, lines)
    plot_answer_rates(out / "picture.png", lines)
    wrong = [line["setting"] for line in lines if line["exact"] and line["same_tokens"] < len(turns[-1])]
    if wrong and not words.options["shape"]:
        print_note(f"not the tokens of {settings[0].name} for every question: {', '.join(wrong)}")
        raise SystemExit(1)


def build_mechanism_settings(
    config: DecodeConfig, layout: str, prefix_cache_gib: float, compiled: bool = False
) -> dict[str, tuple[bool, DecodeConfig, EngineConfig | None]]:
    """Settings by name, each switching one more thing on: exact?, what is done, how (None: plainly)."""
    config = replace(config, overlap="none", retrieval_interval=1, retrieval_threshold=None)
    batch = replace(config, batch_size=config.batch_size if config.batch_size > 1 else 16)
    single = replace(config, batch_size=1)
    masked = EngineConfig(prefix_cache_gib=0.0)
    pool = masked if layout == "joint" else EngineConfig(prefix_cache_gib=prefix_cache_gib)
    of = f"batch of {batch.batch_size}"
    found: dict[str, tuple[bool, DecodeConfig, EngineConfig | None]] = {
        "reference": (True, single, None),
        "+ masked positions only": (True, single, masked),
        "+ evidence pool": (True, single, pool),
        f"+ {of}": (True, batch, pool),
        "+ pipeline": (True, replace(batch, overlap="pipeline"), pool),
        f"{of}, no pool": (True, batch, masked),
    }
    if compiled:
        found[f"{of}, compiled"] = (False, batch, replace(pool, compile=True))
    if layout == "joint":
        del found["+ evidence pool"], found[f"{of}, no pool"]
    return found


def make_cumulative_settings(prepared: PreparedDecoder) -> list[BenchSetting]:
    denoiser, engine = require_masked_denoiser(prepared.load()), prepared.config.engine
    ways = build_mechanism_settings(
        prepared.config.decode, prepared.evidence_layout, engine.prefix_cache_gib or 1.0, engine.compile
    )
    return [
        BenchSetting(name, build_decoder(prepared, denoiser, decode, how), exact)
        for name, (exact, decode, how) in ways.items()
    ]


def make_replay_settings(
    prepared: PreparedDecoder, questions: list[Question], shape: str
) -> list[BenchSetting]:
    """Random weights that follow recorded decodes: the joint layout, then the independent one."""
    replay = DecodeReplay.record_decodes(prepared, questions, shape)
    prefix_cache_gib = prepared.config.engine.prefix_cache_gib or 1.0
    found = [
        BenchSetting(
            f"{layout}, {name.removeprefix('+ ')}",
            replay.build_replay_decoder(layout, how, engine),
            exact=False,
        )
        for layout, left_out in REPLAY_EXCLUDED.items()
        for name, (exact, how, engine) in build_mechanism_settings(
            replay.decode, layout, prefix_cache_gib
        ).items()
        if exact and name not in left_out
    ]
    ways = build_mechanism_settings(replay.decode, "independent", prefix_cache_gib)
    with_pool = [(name, how, engine) for name, (exact, how, engine) in ways.items() if exact and engine]
    return found + [
        BenchSetting(
            f"blocks, {order}, {name.removeprefix('+ ')}",
            replay.build_replay_decoder("independent", how, engine, order),
            exact=False,
        )
        for order in ("recompute", "no_evidence")
        for name, how, engine in with_pool
        if engine.prefix_cache_gib and how.overlap == "none"
    ]


def measure_in_rounds(
    settings: Sequence[BenchSetting], turns: list[list[Question]], earlier: Sequence[Question] = ()
) -> None:
    """Gives every setting its turn in every round, after a warm-up of two questions each.

    turns: what is asked in each round. earlier: what every pool has seen; then it is never emptied.
    """
    for number in range(-1, len(turns)):
        asked: Sequence[Question] = turns[0][:2] if number < 0 else turns[number]
        for setting in rotate(settings, max(0, number)):
            decoder = setting.decoder
            proposer = find_caching_runner(decoder)
            before = replace(require_masked_denoiser(decoder).flop_count)
            if not earlier and proposer is not None:
                proposer.reset_cache()
            elif number < 0:
                asked = earlier if proposer is not None and proposer.pool is not None else earlier[:2]
            with open_meter("auto", decoder.denoiser.device) as meter:
                start = time.perf_counter()
                rollouts = {rollout.id: rollout for rollout in decoder.stream(asked)}
                seconds = time.perf_counter() - start
            reuse = CacheStats() if proposer is None else replace(proposer.cache_stats)
            if number < 0:
                setting.seen = reuse
                continue
            setting.seconds.append(seconds)
            setting.rollouts = [rollouts[question.id] for question in asked]
            wanted, encoded = reuse.requested_tokens, reuse.encoded_tokens
            if earlier:
                wanted -= setting.seen.requested_tokens
                encoded -= setting.seen.encoded_tokens
                setting.seen = reuse
            setting.reuse = CacheStats(wanted, encoded).reused_share
            setting.work = require_masked_denoiser(decoder).flop_count - before
            tally = RunTotals(decoder.tokenizer.end_ids)
            for rollout in setting.rollouts:
                setting.stages.update(drop_nested_stages(rollout.seconds))
                tally.add(rollout)
            setting.energy.append(tally.energy_record(meter.reading))
            print_note(f"round {number + 1}, {setting.name}: {len(asked) / seconds:.2f} answers/s")


def summarise_settings(
    settings: Sequence[BenchSetting], turns: list[list[Question]], roofline: Roofline | None = None
) -> list[dict[str, Any]]:
    """The line of each setting: medians, ranges, how it stands to the first and to the device's best."""
    lines, first, questions = [], settings[0], turns[-1]
    for setting in settings:
        forwards = sum(rollout.forwards for rollout in setting.rollouts)
        tokens = sum(rollout.tokens_committed for rollout in setting.rollouts)
        ratios = [theirs / ours for theirs, ours in zip(first.seconds, setting.seconds, strict=True)]
        whole = sum(setting.stages.values())
        pairs = zip(setting.rollouts, first.rollouts, strict=True)
        scored = zip(setting.rollouts, questions, strict=True)
        lines.append(
            {
                "setting": setting.name,
                "answers_per_second": len(questions) / median(setting.seconds),
                "answers_per_second_range": [
                    len(questions) / extreme(setting.seconds) for extreme in (max, min)
                ],
                "speed_up": median(ratios),
                "speed_up_range": [min(ratios), max(ratios)],
                "seconds_per_forward": median(setting.seconds) / forwards,
                "forwards": forwards / len(questions),
                "tokens_per_forward": tokens / forwards,
                "exact": setting.exact,
                "same_tokens": sum(
                    committed_tokens_by_step(ours) == committed_tokens_by_step(theirs)
                    for ours, theirs in pairs
                ),
                "exact_match": float(
                    np.mean([compute_exact_match(r.answer, q.golden_answers) for r, q in scored])
                ),
                "reuse": setting.reuse,
                "stages": {name: seconds / whole for name, seconds in setting.stages.most_common()},
                "seconds": setting.seconds,
                "energy": summarise_energy(setting.energy),  # of the rounds that were measured
                "flops": setting.work.flops,
                "bytes": setting.work.bytes_moved,
                "tokens_run": setting.work.tokens,
                "calls": setting.work.calls,
            }
        )
        if roofline is not None:
            lines[-1] |= {
                "roofline": asdict(roofline),
                "roofline_share": roofline.least_seconds(setting.work) / median(setting.seconds),
                "bound": roofline.limiting_resource(setting.work),
            }
    return lines


def write_decode_report(out: Path, stamp: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """The table: on the screen, in Markdown, and all figures in JSON."""
    peak = get_peak_memory_bytes()
    write_json(out / "scores.json", {"stamp": stamp, "peak_bytes": peak, "settings": lines})
    headings = [
        "setting",
        "answers/s",
        "speed-up",
        "same tokens",
        "EM %",
        "forwards",
        "ms/forward",
        "reused",
    ]
    rows, more = [], []
    for line in lines:
        low, high = line["answers_per_second_range"]
        least, most = line["speed_up_range"]
        rows.append([
            line["setting"],
            f"{line['answers_per_second']:.2f} [{low:.2f}, {high:.2f}]",
            f"{line['speed_up']:.2f} [{least:.2f}, {most:.2f}]",
            str(line["same_tokens"]), f"{100 * line['exact_match']:.1f}", f"{line['forwards']:.1f}",
            f"{1e3 * line['seconds_per_forward']:.1f}", f"{100 * line['reuse']:.1f} %",
        ])  # fmt: skip
        stages = ", ".join(f"{name} {part:.0%}" for name, part in line["stages"].items() if part >= 0.02)
        best = f"{line['roofline_share']:.0%} ({line['bound']})" if "bound" in line else ""
        more.append([*rows[-1], f"{line['tokens_run']:,}", best, stages])
    print_table(headings, rows)
    wide = format_markdown_table([*headings, "tokens run", "of the roofline", "stages"], more)
    origin = f"Commit {stamp['commit']}, {stamp['date']}, {stamp['device']}, {stamp['threads']} threads."
    write_text_atomic(out / "table.md", f"{wide}\n\n{origin}\n")


def plot_answer_rates(path: Path, lines: list[dict[str, Any]]) -> None:
    """Answers a second of every setting, with the range over the rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.42 * len(lines) + 1), layout="constrained")
    axis = figure.subplots()
    for place, line in enumerate(lines):
        value, (low, high) = line["answers_per_second"], line["answers_per_second_range"]
        colour = "#3b78b5" if line["exact"] else "#c0873c"
        axis.barh(
            place, value, color=colour, xerr=[[value - low], [high - value]], ecolor="0.4", height=0.7
        )
        axis.text(high, place, f"  {value:.2f}  ({line['speed_up']:.1f}x)", va="center", fontsize=9)
    axis.set_yticks(range(len(lines)), [line["setting"] for line in lines])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(line["answers_per_second_range"][1] for line in lines))
    axis.set_xlabel("answers a second; blue: the tokens of the reference, brown: another algorithm")
    save_figure(path, figure)


if __name__ == "__main__":
    run_program(main)
