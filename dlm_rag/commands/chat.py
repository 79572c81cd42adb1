"""Ask one question after another in a terminal; the model stays in memory.

    dlm-rag chat                                 # six example passages
    dlm-rag chat --corpus notes                  # your own
    dlm-rag chat --model DIR_OR_HUB_ID --corpus passages.jsonl

Type a question and press Enter. "it" and "he" are what came before.

    /sources    the passages of the last answer
    /why        its steps: what each wrote, searched for and read
    /quit       end (or Ctrl-D)
"""

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from dlm_rag.cli import print_note
from dlm_rag.commands.arguments import parse_command_line
from dlm_rag.commands.prepare_decoder import fill_in_shipped_files, prepare_decoder
from dlm_rag.commands.serve import EXAMPLES, SERVED_BY, describe_corpus
from dlm_rag.config import Config
from dlm_rag.errors import ConfigError, QuestionError
from dlm_rag.progress import show_status
from dlm_rag.questions import Question
from dlm_rag.serving.conversation import Turn, make_question_stand_alone

CHAT_SETTINGS = (
    "model", "prompt", "retrieval", "-retrieval.oracle", "decode", "-decode.batch_size", "engine",
    "out", "-out",  # as sample: without a model the shipped reader
)  # fmt: skip
HELP = "/sources: the passages of the last answer; /why: its steps; /quit: end"


def main(argv: list[str]) -> None:
    if not any(word.startswith(SERVED_BY) for word in argv):
        argv = [*argv, "--corpus", str(EXAMPLES / "passages.jsonl")]
    words = parse_command_line(__doc__ or "", argv, CHAT_SETTINGS)
    if words.config.retrieval.oracle:
        raise ConfigError("retrieval.oracle needs supporting_ids, which a typed question does not have")
    chat(fill_in_shipped_files(words.config, [""]), Console(highlight=False))


def chat(config: Config, console: Console) -> None:
    """Answers what is typed until its end. Raises `UserError`, `RunError`."""
    prepared = prepare_decoder(config, [])
    from dlm_rag.decode.rollout import Rollout
    from dlm_rag.decode.terminal import LiveView, escape_text, render_reply, render_sources, render_steps
    from dlm_rag.retrieval.base import describe_source

    decoder = prepared.load()
    show_status()
    console.print(f"Answers come from {describe_source(decoder.retriever)}.", style="bold")
    suggested, note = describe_corpus(config)
    for line in (note, *(f"  {question}" for question in suggested), HELP):
        if line:
            console.print(escape_text(line, "dim"))
    turns, last = list[Turn](), Rollout("", "", "", 0)
    for typed in _read_lines(console):
        if typed.startswith("/"):
            if typed in ("/quit", "/exit", "/q"):
                return
            shown = {"/sources": render_sources, "/why": render_steps}.get(typed)
            if shown is None:
                console.print(escape_text(HELP, "dim"))
            else:
                console.print(shown(last) if last.finished else Text("nothing was answered yet", "dim"))
            continue
        asked = make_question_stand_alone([*turns, ("user", typed)])
        try:
            if console.is_terminal:
                with LiveView(console) as view:
                    (last,) = decoder.stream([Question("q1", asked)], view.step)
            else:
                (last,) = decoder.stream([Question("q1", asked)])
        except QuestionError as error:
            print_note(f"error: {error}")
            continue
        if asked != typed:
            console.print(escape_text(f"({asked})", "dim"))
        console.print(render_reply(last))
        turns += [("user", typed), ("assistant", last.answer)]


def _read_lines(console: Console) -> Iterator[str]:
    """Yields what is typed, without blank lines; with a prompt in a terminal."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives `input` the arrow keys and what was typed before
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() and console.is_terminal else "").strip()
        except EOFError:
            return
        if line:
            yield line
