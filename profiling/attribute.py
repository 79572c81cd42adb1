"""Where the time of a profiling session went, by stage.

    python profiling/attribute.py REPORT [--baseline OTHER] [--out FOLDER] [--energy FILE]

REPORT is a report of Nsight Systems (.nsys-rep, .qdstrm, its .sqlite export) or a trace of torch.profiler
(.json, .json.gz). For every stage: calls, wall time, self time (without the stages inside it), its share of
the session; the time its GPU work ran, the time the GPU stood still while the stage was open, the time
the host waited for the GPU; the heaviest kernels. Self times and what no stage covers add up to the whole.
Then the steps (first, median, 95th percentile, last), the time of a question, and how much of retrieval
ran beside denoising. --baseline: what got slower first. Prints tables; --out also gets report.md,
report.json, report.png and report.html. --energy: the stamp of the run's answers (answers.jsonl.run.json),
or metrics.jsonl of a training; its mean power times the self time of a stage is the stage's joules. That
is by time share: no sensor is fast enough to see a stage.

Only ranges of the NVTX domain `dlm_rag` count, of the process that has most of them (one rank of a training
on many). What runs on other threads than the one of the steps is shown beside it and is no part of the sum.
"""

import base64
import io
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from attribution import (
    OUTSIDE_STAGES,
    Attribution,
    StageTime,
    attribute_session,
    compare_attributions,
    find_outer_steps,
)
from bench_tools import (
    TableRow,
    format_markdown_table,
    print_table,
    save_figure,
    write_json,
)
from profile_readers import RANGE_NAMES, ProfileSession, Spans, Times, read_profile_session
from rich.console import Console

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.energy.meter import summarise_energy
from dlm_rag.errors import ConfigError
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import make_folder, write_text_atomic
from dlm_rag.training.metrics_logger import read_metrics

SHOWN_STEPS, SHOWN_RANGES = 4, 2000
MAX_KERNEL_NAME_CHARS = 60  # of a kernel
ReportTable = tuple[str, list[TableRow]]  # title, rows
PAGE = """<!doctype html><meta charset=utf-8><title>Where the time went</title>
<img alt="steps and shares" style="max-width:100%" src="data:image/png;base64,{picture}">
<pre style="font-family:monospace">{{code}}</pre>
"""


def build_tables(found: Attribution, baseline: Attribution | None) -> list[ReportTable]:
    """The tables of an attribution."""
    whole = StageTime(
        "all", 0, found.wall, found.wall, 1.0, 0.0, found.gpu_busy, found.wall - found.gpu_busy, 0.0, {}
    )
    rows: list[TableRow] = []
    for part in (*found.stages, whole):
        row = {"stage": part.stage, "calls": part.calls or None, "wall, s": f"{part.wall:.3f}"}
        row |= {"self, s": f"{part.self_time:.3f}", "self, %": f"{100 * part.share:.1f}"}
        row["beside, s"] = f"{part.beside:.3f}" if part.beside else ""
        if found.gpu_busy:
            row |= {"GPU busy, s": f"{part.gpu_busy:.3f}", "GPU idle, s": f"{part.gpu_idle:.3f}"}
            row["host waits, s"] = f"{part.host_waits:.3f}" if part is not whole else ""
        if found.watts is not None:
            row["J, by time share"] = f"{part.self_time * found.watts:.3g}"
        rows.append(row)
    tables: list[ReportTable] = [("Where the time went", rows)]
    if found.gpu_busy:
        kernels = [
            {"stage": part.stage, "kernel": kernel[:MAX_KERNEL_NAME_CHARS], "s": f"{seconds:.3f}"}
            for part in found.stages
            for kernel, seconds in part.kernels.items()
        ]
        tables.append(("The heaviest kernels", kernels))
    if (steps := found.steps) is not None:
        row = {"steps": steps.count, "rows a step": f"{steps.rows:.1f}", "first, ms": 1e3 * steps.first}
        row |= {"median": 1e3 * steps.median, "95 %": 1e3 * steps.p95, "last": 1e3 * steps.last}
        tables.append(("Steps", [row]))
    unit, count = next(iter(found.counts_by_unit.items()))
    if unit != "session":
        parts = [
            {"stage": part.stage, "self, ms": f"{1e3 * part.self_time / count:.2f}"}
            for part in (*found.stages, whole)
        ]
        tables.append((f"A {unit}, of {count:,}", parts))
    if baseline is not None:
        unit, slower = compare_attributions(found, baseline)
        lines = [
            {"stage": name, "before, ms": f"{1e3 * old:.2f}", "now, ms": f"{1e3 * new:.2f}",
             "more": f"{1e3 * (new - old):+.2f}"}
            for name, old, new in slower
        ]  # fmt: skip
        tables.append((f"A {unit} against the baseline, what got slower first", lines))
    return tables


def format_overlap_note(found: Attribution) -> str:
    """What ran beside what, and what is not in the tables."""
    said = f"{found.overlap:.3f} s of retrieval ran" if found.overlap else "No retrieval ran"
    left_out = f" Ranges of {found.others} other processes are left out." if found.others else ""
    gpu = "" if found.gpu_busy else " There is no GPU work in this report (--trace=nvtx,cuda records it)."
    joules = f" Joules: {found.watts:.3g} W, the mean of the run, times self time." if found.watts else ""
    return f"{said} beside denoising.{left_out}{gpu}{joules}"


def write_attribution_report(
    out: Path, session: ProfileSession, found: Attribution, baseline: Attribution | None
) -> None:
    """report.json, report.md, report.png and report.html in a folder."""
    record = {"now": asdict(found)} | ({"baseline": asdict(baseline)} if baseline else {})
    notes, title = [format_overlap_note(found)], Path(found.source).name
    if machine := read_json_or_empty(out / "machine.json"):  # of nsys.py, which recorded the session
        record["machine"] = machine
        notes.append(", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json(out / "report.json", record)
    plot_timeline(out / "report.png", session, found)
    blocks, page = [f"# {title}"], Console(record=True, file=io.StringIO(), width=140, markup=False)
    page.print(title)
    for heading, rows in build_tables(found, baseline):
        blocks += [f"**{heading}**", format_markdown_table(rows)]
        print_table(rows, heading, console=page)
    for note in notes:
        page.print(note, soft_wrap=True)
    write_text_atomic(out / "report.md", "\n\n".join([*blocks, *notes]) + "\n")
    picture = base64.b64encode((out / "report.png").read_bytes()).decode()
    html = page.export_html(inline_styles=True, code_format=PAGE.format(picture=picture))
    write_text_atomic(out / "report.html", html)


def plot_timeline(path: Path, session: ProfileSession, found: Attribution) -> None:
    """A timeline of some steps around the middle, above the share of each stage."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    stages = np.array(RANGE_NAMES)[session.stage]
    names = (*RANGE_NAMES, OUTSIDE_STAGES, "GPU")
    colours = dict(zip(names, colormaps["tab20"](np.arange(len(names))), strict=True))
    places = np.flatnonzero(find_outer_steps(session))
    middle = max(0, len(places) // 2 - SHOWN_STEPS // 2)
    window = places[middle : middle + SHOWN_STEPS]
    begin = int(session.start[window].min() if len(window) else session.start.min())
    finish = int(session.end[window].max() if len(window) else session.end.max())
    threads = [session.main, *(t for t in np.unique(session.thread).tolist() if t != session.main)]
    figure = Figure(figsize=(11, 3.4 + 0.5 * len(threads)), layout="constrained")
    time, shares = figure.subplots(2, 1, height_ratios=[len(threads) + 1.2, 1])

    def draw(spans: ProfileSession | Spans, chosen: Times, level: int, height: float, name: str) -> None:
        """Intervals as bars on one level, in milliseconds."""
        left, right = ((times[chosen] - begin) / 1e6 for times in (spans.start, spans.end))
        pairs = list(zip(left.tolist(), (right - left).tolist(), strict=True))
        time.broken_barh(pairs, (level - height / 2, height), color=colours[name], linewidth=0)

    shown = np.flatnonzero((session.end > begin) & (session.start < finish))[:SHOWN_RANGES]
    labels = []
    for level, thread in enumerate(threads):
        ours = shown[session.thread[shown] == thread]
        for part in dict.fromkeys(["step", *stages[ours].tolist()]):
            height = 0.8 if part == "step" else 0.6 if "/" not in part else 0.3
            draw(session, ours[stages[ours] == part], level, height, part)
        labels.append("steps" if thread == session.main else "beside")
    running = np.flatnonzero((session.gpu.end > begin) & (session.gpu.start < finish))[:SHOWN_RANGES]
    if len(running):
        draw(session.gpu, running, len(threads), 0.6, "GPU")
        labels.append("GPU")
    time.set_yticks(range(len(labels)), labels)
    time.invert_yaxis()
    time.set(xlim=(0, (finish - begin) / 1e6), xlabel="ms")
    time.set_title(f"{len(window)} of {len(places)} steps, from the middle", loc="left", fontsize=11)
    at = 0.0
    for part in found.stages:
        share = 100 * part.share
        label = part.stage if share >= 0.2 else None
        shares.barh(0, share, left=at, color=colours[part.stage], edgecolor="white", label=label)
        if share > 5:
            shares.text(at + share / 2, 0, f"{share:.0f}", ha="center", va="center", fontsize=9)
        at += share
    shares.set(xlim=(0, 100), yticks=[], xlabel="% of the session, by self time")
    figure.legend(loc="outside right center", frameon=False)
    save_figure(path, figure)


def read_mean_watts(path: Path) -> float:
    """Mean power of a run, from its stamp or metrics. Raises `ConfigError` where nothing was measured."""
    measured = summarise_energy(read_json_or_empty(path).get("energy"))
    if measured is not None:
        return float(measured["watts"])
    lines = [line for line in read_metrics(path) if line.get("joules") is not None]
    seconds = sum(line["joules_seconds"] for line in lines)
    if not seconds:
        raise ConfigError(
            f"--energy {path} holds no joules: name the stamp or metrics.jsonl of a run that was measured"
        )
    return float(sum(line["joules"] for line in lines) / seconds)


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="attribute.py")
    parser.add_argument("report", type=Path)
    parser.add_argument("--baseline", type=Path, help="an earlier report to compare with")
    parser.add_argument("--out", type=Path, help="folder for report.md, .json, .png, .html")
    parser.add_argument("--energy", type=Path, help="a stamp or metrics.jsonl of the run, with its joules")
    given = parser.parse_args(argv)
    if given.out is not None:
        make_folder(given.out)
    watts = read_mean_watts(given.energy) if given.energy else None
    session = read_profile_session(given.report)
    found = replace(attribute_session(session), watts=watts)
    baseline = attribute_session(read_profile_session(given.baseline)) if given.baseline else None
    for title, rows in build_tables(found, baseline):
        print_table(rows, title)
    print(format_overlap_note(found))
    if given.out is not None:
        write_attribution_report(given.out, session, found, baseline)
        print_note(f"the page is {given.out / 'report.html'}")


if __name__ == "__main__":
    run_program(main)
