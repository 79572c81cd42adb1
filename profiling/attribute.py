"""Where the time of a profiling session went, by stage.

    python profiling/attribute.py REPORT [--baseline OTHER] [--out FOLDER] [--energy FILE]

REPORT is a report of Nsight Systems (.nsys-rep, .qdstrm, its .sqlite export) or a trace of torch.profiler
(.json, .json.gz). For every stage: calls, wall time, self time (without the stages inside it), its share of
the session; the time its GPU work ran, the time the GPU stood still while the stage was open, the time
the host waited for the GPU; the heaviest kernels. Self times and what no stage covers add up to the whole.
Then the steps (first, median, 95th percentile, last), the time of a question, and how much of retrieval
ran beside denoising. --baseline: what got slower first. Prints tables; --out also gets report.md
and report.json. --energy: the stamp of the run's answers (answers.jsonl.run.json); its mean power times the
self time of a stage is the stage's joules. That is by time share: no sensor is fast enough to see a stage.

Only ranges of the NVTX domain `dlm_rag` count, of the process that has most of them (one rank of a training
on many). What runs on other threads than the one of the steps is shown beside it and is no part of the sum.
"""

from dataclasses import asdict, replace
from pathlib import Path

from attribution import Attribution, StageTime, attribute_session, compare_attributions
from bench_tools import TableRow, format_markdown_table, print_table, write_json
from profile_readers import read_profile_session

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.energy import summarise_energy
from dlm_rag.errors import ConfigError
from dlm_rag.files.checked_json import read_json_or_empty
from dlm_rag.files.paths import make_folder, write_text_atomic

MAX_KERNEL_NAME_CHARS, SHOWN_KERNELS = 60, 3  # of a kernel, and how many of a stage are in the table
ReportTable = tuple[str, list[TableRow]]  # title, rows


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
    kernels = [
        {"stage": part.stage, "kernel": kernel[:MAX_KERNEL_NAME_CHARS], "s": f"{seconds:.3f}"}
        for part in found.stages
        if part.stage != "step"  # around all of them
        for kernel, seconds in [*part.kernels.items()][:SHOWN_KERNELS]
    ]
    if kernels:
        tables.append((f"The heaviest {'kernels' if found.gpu_busy else 'operators'}", kernels))
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
        tables.append((f"Per {unit}, mean of {count:,}", parts))
    if baseline is not None:
        unit, slower = compare_attributions(found, baseline)
        lines = [
            {"stage": name, "before, ms": f"{1e3 * old:.2f}", "now, ms": f"{1e3 * new:.2f}",
             "more": f"{1e3 * (new - old):+.2f}"}
            for name, old, new in slower
        ]  # fmt: skip
        tables.append((f"Per {unit}, against the baseline, largest slowdown first", lines))
    return tables


def format_overlap_note(found: Attribution) -> str:
    """What ran beside what, and what is not in the tables."""
    said = f"{found.overlap:.3f} s of retrieval ran" if found.overlap else "No retrieval ran"
    left_out = f" Ranges of {found.others} other processes are left out." if found.others else ""
    gpu = (
        ""
        if found.gpu_busy
        else " There is no GPU work in this report (of nsys, --trace=nvtx,cuda records it)."
    )
    joules = f" Joules: {found.watts:.3g} W, the mean of the run, times self time." if found.watts else ""
    return f"{said} beside denoising.{left_out}{gpu}{joules}"


def write_attribution_report(out: Path, found: Attribution, baseline: Attribution | None) -> None:
    """Writes report.json and report.md into a folder."""
    record = {"now": asdict(found)} | ({"baseline": asdict(baseline)} if baseline else {})
    title, machine = describe_run(found)
    notes = [format_overlap_note(found)]
    if machine:
        record["machine"] = machine
        notes.append(", ".join(f"{name} {value}" for name, value in machine.items()))
    if baseline is not None:
        notes.insert(0, f"Before: {describe_run(baseline)[0]}")
    write_json(out / "report.json", record)
    blocks = [f"# {title}"]
    for heading, rows in build_tables(found, baseline):
        blocks += [f"**{heading}**", format_markdown_table(rows)]
    write_text_atomic(out / "report.md", "\n\n".join([*blocks, *notes]) + "\n")


def describe_run(found: Attribution) -> tuple[str, dict[str, str]]:
    """What was run, or the file, and the machine: as nsys.py has left them beside the report."""
    source = Path(found.source)
    machine = read_json_or_empty(source.parent / "machine.json")
    return machine.pop("command", source.name), machine


def read_mean_watts(path: Path) -> float:
    """Returns the mean power of a run, from its stamp. Raises `ConfigError` where nothing was measured."""
    measured = summarise_energy(read_json_or_empty(path).get("energy"))
    if measured is None:
        raise ConfigError(f"--energy {path} holds no joules: name the stamp of a run that was measured")
    return float(measured["watts"])


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="attribute.py")
    parser.add_argument("report", type=Path)
    parser.add_argument("--baseline", type=Path, help="an earlier report to compare with")
    parser.add_argument("--out", type=Path, help="folder for report.md and report.json")
    parser.add_argument("--energy", type=Path, help="the stamp of the run, with its joules")
    given = parser.parse_args(argv)
    if given.out is not None:
        make_folder(given.out)
    watts = read_mean_watts(given.energy) if given.energy else None
    found = replace(attribute_session(read_profile_session(given.report)), watts=watts)
    baseline = attribute_session(read_profile_session(given.baseline)) if given.baseline else None
    for title, rows in build_tables(found, baseline):
        print_table(rows, title)
    print(format_overlap_note(found))
    if given.out is not None:
        write_attribution_report(given.out, found, baseline)
        print_note(f"the report is {given.out / 'report.md'}")


if __name__ == "__main__":
    run_program(main)
