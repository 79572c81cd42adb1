"""What each mechanism of the decode engine saves, against a plain reference mode.

    python profiling/bench_decode.py --out runs/decode                    # the shipped model and world
    python profiling/bench_decode.py --out runs/dream --config sardi.yaml --model DIR --corpus FILE \\
        --questions FILE                                                  # a checkpoint of your own
    python profiling/bench_decode.py --out runs/100m --shape 100m         # random weights, recorded steps
    python profiling/bench_decode.py --out runs/sweep --sweep passages    # or canvas, batch

The reference mode is the published algorithm: one question at a time, nothing kept, the whole model at
all positions. Mechanisms are switched on one after another; the exact ones must give its very tokens.
Settings take turns on the same questions, round after round, each round beginning with another one.
Times are medians over the rounds with their range, speed-ups medians of the ratios within a round.

--shape: a denoiser of that size with random weights follows the commits and the evidence of decodes of
the shipped model (canvas 64, 7 passages of 100 tokens), with attention whole and in blocks. --sweep:
seconds a forward of one row, by one quantity, with and without the pool. engine.compile=true adds compiled
layers. What the device could do at best is measured before, FLOPs and bytes are counted (roofline.py).
--before: a pool as it is in the middle of a long run; it has seen that many other questions, and every
round asks new ones. Writes scores.json, table.md and picture.png into --out.
"""

import copy
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from decode_replay import (
    CANVAS_LENGTH,
    RANDOM_MODEL_SHAPES,
    ReferenceModelRunner,
    ReplayModelRunner,
    ReplayRetriever,
    ReplayTokenizer,
    make_random_denoiser,
)
from rich.console import Console
from rich.table import Column, Table
from roofline import Roofline, measure_roofline

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.cli_args import parse_command_line
from dlm_rag.commands.startup import (
    PreparedDecoder,
    apply_shipped_defaults,
    gather_questions,
    prepare_decoder,
)
from dlm_rag.config import DecodeConfig, EngineConfig
from dlm_rag.decode.decoder import Decoder
from dlm_rag.decode.model_runner import MaskedModelRunner
from dlm_rag.decode.rollout import Rollout
from dlm_rag.decode.terminal import RunTotals
from dlm_rag.energy.meter import open_meter
from dlm_rag.energy.reading import summarise_energy
from dlm_rag.errors import ConfigError
from dlm_rag.evaluation.metrics import compute_exact_match
from dlm_rag.evidence.segment_kv_cache import CacheStats
from dlm_rag.files.atomic import open_atomic_file, write_text_atomic
from dlm_rag.machine import get_peak_memory_bytes
from dlm_rag.model.denoiser import Denoiser
from dlm_rag.model.flops import FlopCount
from dlm_rag.nvtx_ranges import drop_nested_stages
from dlm_rag.questions import Question

SWEEPS = {
    "passages": ("retrieval.top_k", (1, 2, 4, 7, 16, 32)),
    "canvas": ("decode.max_new_tokens", (48, 64, 96, 128)),
    "batch": ("decode.batch_size", (1, 2, 4, 8, 16, 32, 64)),
}
# What --shape leaves out: too small to be seen beside a large model, or measured in the other layout.
REPLAY_EXCLUDED = {
    "joint": ("+ pipeline", "+ masked positions only"),
    "independent": ("+ pipeline", "reference"),
}
NO_POOL_ENGINE = EngineConfig(prefix_cache_gib=0.0)
BLOCK_LENGTH = 8  # of the shipped model, whose decodes are replayed
OPTIONS: dict[str, tuple[str | int, str]] = {
    "limit": (40, "questions, from all over the file"),
    "rounds": (5, "times that every setting has its turn"),
    "before": (0, "questions that every pool has seen before the first round"),
    "shape": ("", f"random weights: {', '.join(RANDOM_MODEL_SHAPES)}"),
    "sweep": ("", f"one quantity: {', '.join(SWEEPS)}"),
}


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
    words = parse_command_line(__doc__ or "", argv, typed=False, options=OPTIONS)
    config = apply_shipped_defaults(words.config, [])
    if config.out is None:
        raise ConfigError("the benchmark needs --out FOLDER")
    if config.retrieval.url is not None:
        raise ConfigError("the benchmark replays the passages of a corpus: leave retrieval.url out")
    for name, known in (("shape", RANDOM_MODEL_SHAPES), ("sweep", SWEEPS)):
        if words.options[name] not in ("", *known):
            raise ConfigError(f"--{name} {words.options[name]} is not one of {', '.join(known)}")
    limit, rounds, before = (words.options[name] for name in ("limit", "rounds", "before"))
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    config = replace(config, out=None, trace=None)
    everything = gather_questions(config, [])
    asked = select_evenly(everything, limit * rounds if before else limit)
    # With pools that stay full, a question asked twice would find its own evidence.
    turns = [asked[n::rounds] if before else asked for n in range(rounds)]
    earlier = select_evenly([q for q in everything if q not in asked], before)
    questions = [*asked, *earlier]
    prepared = prepare_decoder(config, questions)
    stamp = prepared.stamp()
    if words.options["sweep"]:
        quantity = words.options["sweep"]
        key, values = SWEEPS[quantity]
        lines = []
        for value in values:
            at = prepare_decoder(
                apply_shipped_defaults(words.config_with([f"{key}={value}"]), []), questions
            )
            settings = make_pool_settings(at)
            measure_in_rounds(settings, turns)
            lines += [{quantity: value} | line for line in summarise_settings(settings, turns)]
        write_decode_report(out, stamp, lines, quantity)
        plot_sweep(out / "picture.png", lines, quantity)
        return
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


def select_evenly(questions: list[Question], count: int) -> list[Question]:
    """`count` questions from all over the file."""
    count = min(count, len(questions))
    return [questions[n * len(questions) // count] for n in range(count)]


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
        f"{of}, stale evidence": (False, replace(batch, overlap="stale_evidence"), pool),
    }
    if compiled:
        found[f"{of}, compiled"] = (False, batch, replace(pool, compile=True))
    if layout == "joint":
        del found["+ evidence pool"], found[f"{of}, no pool"]
    return found


def require_masked_denoiser(decoder: Decoder) -> Denoiser:
    """The denoiser of a decoder; raises `ConfigError` for one of uniform noise, which counts no work."""
    if not isinstance(decoder.denoiser, Denoiser):
        raise ConfigError("this measures models that denoise from masks: name one with --model")
    return decoder.denoiser


def build_decoder(
    prepared: PreparedDecoder, denoiser: Denoiser, decode: DecodeConfig, engine: EngineConfig | None
) -> Decoder:
    """A decoder that does it so; plainly without an engine."""
    if engine is not None and engine.compile:
        denoiser = copy.deepcopy(denoiser)
    decoder = Decoder(
        denoiser,
        prepared.retriever,
        prepared.tokenizer,
        decode,
        prepared.evidence_layout,
        engine or NO_POOL_ENGINE,
    )
    if engine is None:
        plain: Any = ReferenceModelRunner(denoiser, prepared.tokenizer.mask_id)
        decoder.model_runner = plain
    return decoder


def make_cumulative_settings(prepared: PreparedDecoder) -> list[BenchSetting]:
    denoiser, engine = require_masked_denoiser(prepared.load()), prepared.config.engine
    ways = build_mechanism_settings(
        prepared.config.decode, prepared.evidence_layout, engine.prefix_cache_gib or 1.0, engine.compile
    )
    return [
        BenchSetting(name, build_decoder(prepared, denoiser, decode, how), exact)
        for name, (exact, decode, how) in ways.items()
    ]


def make_pool_settings(prepared: PreparedDecoder) -> list[BenchSetting]:
    denoiser, engine = require_masked_denoiser(prepared.load()), prepared.config.engine
    return [
        BenchSetting(
            name,
            build_decoder(
                prepared, denoiser, prepared.config.decode, replace(engine, prefix_cache_gib=pool)
            ),
        )
        for name, pool in (("no pool", 0.0), ("pool", 1.0))
    ]


@dataclass(frozen=True)
class DecodeReplay:
    """A denoiser of random weights that follows what the shipped model's decodes committed and found."""

    prepared: PreparedDecoder
    denoiser: Denoiser
    recorded: dict[str, Rollout]
    decode: DecodeConfig  # with the canvas of the recordings

    @classmethod
    def record_decodes(
        cls, prepared: PreparedDecoder, questions: list[Question], shape: str
    ) -> "DecodeReplay":
        """Records decodes of all questions; the denoiser has a shape of
        `decode_replay.RANDOM_MODEL_SHAPES`.
        """
        decode = replace(prepared.config.decode, max_new_tokens=CANVAS_LENGTH)
        recorder = replace(prepared, config=replace(prepared.config, decode=decode)).load()
        recorded = {rollout.id: rollout for rollout in recorder.stream(questions)}
        denoiser = make_random_denoiser(shape, recorder.denoiser.device, recorder.denoiser.dtype)
        print_note(f"{shape}: {sum(p.numel() for p in denoiser.parameters()) / 1e6:.0f} M parameters")
        return cls(prepared, denoiser, recorded, decode)

    def build_replay_decoder(
        self, layout: str, decode: DecodeConfig, engine: EngineConfig | None, order: str | None = None
    ) -> Decoder:
        """As `build_decoder`; order: of finished blocks, for attention in blocks like those of commits."""
        denoiser = self.denoiser
        if order is not None:
            denoiser = copy.copy(denoiser)  # the same weights
            block = decode.block_length or BLOCK_LENGTH
            denoiser.config = replace(denoiser.config, block_size=block, finished_block_context=order)
        tokenizer: Any = ReplayTokenizer(self.denoiser.config.vocab_size)
        corpus: Any = self.prepared.retriever
        retriever = ReplayRetriever(corpus, self.recorded)
        replaying = replace(self.prepared, retriever=retriever, tokenizer=tokenizer, evidence_layout=layout)
        decoder = build_decoder(replaying, denoiser, decode, engine)
        following: Any = ReplayModelRunner(decoder.model_runner, self.recorded, tokenizer)
        decoder.model_runner = following
        return decoder


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


def find_caching_runner(decoder: Decoder) -> MaskedModelRunner | None:
    """What keeps keys and values for a decoder; None where nothing does."""
    proposer: Any = decoder.model_runner
    inner = getattr(proposer, "inner", proposer)
    return inner if isinstance(inner, MaskedModelRunner) else None


def measure_in_rounds(
    settings: Sequence[BenchSetting], turns: list[list[Question]], earlier: Sequence[Question] = ()
) -> None:
    """Gives every setting its turn in every round, after a warm-up of two questions each.

    turns: what is asked in each round. earlier: what every pool has seen; then it is never emptied.
    """
    for number in range(-1, len(turns)):
        first = max(0, number) % len(settings)
        asked: Sequence[Question] = turns[0][:2] if number < 0 else turns[number]
        for setting in (*settings[first:], *settings[:first]):
            decoder = setting.decoder
            proposer, before = (
                find_caching_runner(decoder),
                replace(require_masked_denoiser(decoder).flop_count),
            )
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
                wanted, encoded = (
                    wanted - setting.seen.requested_tokens,
                    encoded - setting.seen.encoded_tokens,
                )
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


def committed_tokens_by_step(rollout: Rollout) -> list[list[tuple[int, int]]]:
    return [[(c.position, c.token_id) for c in step.committed] for step in rollout.steps]


def write_decode_report(
    out: Path, stamp: dict[str, Any], lines: list[dict[str, Any]], quantity: str = ""
) -> None:
    """The table: on the screen, in Markdown, and whole in JSON."""
    peak = get_peak_memory_bytes()
    record = {"stamp": stamp, "peak_bytes": peak, "settings": lines}
    write_text_atomic(out / "scores.json", json.dumps(record, indent=2) + "\n")
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
    rows = []
    for line in lines:
        low, high = line["answers_per_second_range"]
        least, most = line["speed_up_range"]
        rows.append(
            [
                f"{line[quantity]} {quantity}, {line['setting']}" if quantity else line["setting"],
                f"{line['answers_per_second']:.2f} [{low:.2f}, {high:.2f}]",
                f"{line['speed_up']:.2f} [{least:.2f}, {most:.2f}]",
                str(line["same_tokens"]),
                f"{100 * line['exact_match']:.1f}",
                f"{line['forwards']:.1f}",
                f"{1e3 * line['seconds_per_forward']:.1f}",
                f"{100 * line['reuse']:.1f} %",
            ]
        )
    narrow = Table(
        Column(headings[0], no_wrap=True),
        *(Column(heading, justify="right") for heading in ("answers/s", "speed-up", "same tokens", "EM %")),
    )
    for row, line in zip(rows, lines, strict=True):
        narrow.add_row(
            row[0], f"{line['answers_per_second']:.2f}", f"{line['speed_up']:.2f}", row[3], row[4]
        )
    Console(file=sys.stdout).print(narrow)
    stages = [
        ", ".join(f"{name} {share:.0%}" for name, share in line["stages"].items() if share >= 0.02)
        for line in lines
    ]
    best = [f"{line['roofline_share']:.0%} ({line['bound']})" if "bound" in line else "" for line in lines]
    wide = [
        [*headings, "tokens run", "of the roofline", "stages"],
        ["---"] * 11,
        *(
            [*row, f"{line['tokens_run']:,}", share, of]
            for row, line, share, of in zip(rows, lines, best, stages, strict=True)
        ),
    ]
    origin = f"Commit {stamp['commit']}, {stamp['date']}, {stamp['device']}, {stamp['threads']} threads."
    write_text_atomic(
        out / "table.md", "\n".join([*(f"| {' | '.join(row)} |" for row in wide), "", origin, ""])
    )


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
    axis.spines[["top", "right"]].set_visible(False)
    with open_atomic_file(path) as scratch:
        figure.savefig(scratch, dpi=150)


def plot_sweep(path: Path, lines: list[dict[str, Any]], quantity: str) -> None:
    """Milliseconds a forward of one row by one quantity, with the slope in log-log coordinates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axis = figure.subplots()
    for name in dict.fromkeys(line["setting"] for line in lines):
        points = [
            (line[quantity], 1e3 * line["seconds_per_forward"]) for line in lines if line["setting"] == name
        ]
        x, y = np.array(points).T
        slope = np.polyfit(np.log(x), np.log(y), 1)[0]
        axis.loglog(x, y, marker="o", label=f"{name} (slope {slope:.2f})")
    axis.set_xticks(x, [f"{value:.0f}" for value in x])
    low, high = axis.get_ylim()
    ticks = [v * 10.0**e for e in range(-2, 5) for v in (1, 2, 5)]
    ticks = [tick for tick in ticks if low < tick < high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(SWEEPS[quantity][0])
    axis.set_ylabel("ms a forward of one row")
    axis.grid(color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    with open_atomic_file(path) as scratch:
        figure.savefig(scratch, dpi=150)


if __name__ == "__main__":
    run_program(main)
