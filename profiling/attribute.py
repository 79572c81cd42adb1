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

from dataclasses import replace
from pathlib import Path

from attribution import attribute_session
from bench_tools import make_folder
from profile_readers import read_profile_session

from dlm_rag.cli import print_note, run_program
from dlm_rag.commands.cli_args import CommandParser
from dlm_rag.energy.meter import summarise_energy
from dlm_rag.errors import ConfigError
from dlm_rag.files.jsonl import read_json_or_empty
from dlm_rag.training.metrics_logger import read_metrics


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
    from attribution_report import print_attribution, write_attribution_report

    session = read_profile_session(given.report)
    found = replace(attribute_session(session), watts=watts)
    baseline = attribute_session(read_profile_session(given.baseline)) if given.baseline else None
    print_attribution(found, baseline)
    if given.out is not None:
        write_attribution_report(given.out, session, found, baseline)
        print_note(f"the page is {given.out / 'report.html'}")


if __name__ == "__main__":
    run_program(main)
