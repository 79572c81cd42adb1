"""Make a web page that plays the decoding of a trace; it needs no model and no network.

    dlm-rag page trace.jsonl --html page.html
    dlm-rag page static.jsonl interleaved.jsonl --html page.html     # the same questions, side by side
    dlm-rag page trace.jsonl --questions questions.jsonl --html page.html    # with golden answers

`dlm-rag sample --trace FILE` writes a trace; `dlm-rag sample --html FILE` makes the page directly.
"""

from dlm_rag.cli import CommandParser, print_note
from dlm_rag.commands.answer_job import check_distinct_paths
from dlm_rag.errors import ConfigError, TraceError
from dlm_rag.files.paths import expand_path
from dlm_rag.page.render import check_page_target, read_trace_runs, write_page
from dlm_rag.questions import read_questions


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "", prog="dlm-rag page")
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--html", metavar="PATH", required=True, help="where the page goes")
    parser.add_argument("--questions", metavar="PATH", help="the questions with their golden answers")
    given = parser.parse_args(argv)
    if len(given.traces) > 2:
        raise ConfigError(f"a page shows one trace or two, not {len(given.traces)}: leave some out")
    traces = [expand_path(path, TraceError) for path in given.traces]
    page = expand_path(given.html, ConfigError)
    known = read_questions(given.questions) if given.questions else []
    read = {f"trace {number}, {path},": str(path) for number, path in enumerate(traces, start=1)}
    check_distinct_paths({"html": str(page)}, read | {"questions": given.questions})
    check_page_target(str(page))
    write_page(page, read_trace_runs(traces), known)
    print_note(f"the page is in {page}")
