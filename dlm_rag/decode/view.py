"""What a person sees in a terminal: the canvas filling in, the queries, the evidence, the answer."""

from collections import Counter
from itertools import groupby
from time import perf_counter

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dlm_rag.decode.rollout import Rollout
from dlm_rag.stages import without_nested
from dlm_rag.text import fold, visible

MOST_REPEATS = 3  # of a token in a row that are written out
# From the first commits (cool) to the last (warm).
STEP_COLOURS = ("#4fa3ff", "#38c6d9", "#3ddc97", "#a8e05f", "#f2d14b", "#ff9f45", "#ff6b6b")
QUERY_LINES = 3


def plain(text: str, style: str = "") -> Text:
    """Foreign text as it is: no markup, no control characters that move the cursor or ring the bell."""
    return Text(visible(text), style=style)


def colour_of(step: int, steps: int) -> str:
    """The colour of a token committed at `step` (from 1) of `steps`."""
    return STEP_COLOURS[min(len(STEP_COLOURS) - 1, (step - 1) * len(STEP_COLOURS) // max(steps, 1))]


def canvas_text(rollout: Rollout) -> Text:
    """The canvas, committed tokens coloured by their step, masked positions as dots.

    A token that stands many times in a row, as end tokens do, is shown once with its count.
    """
    canvas: dict[int, str] = {}
    for state in rollout.replay():
        canvas = {position: token.token for position, token in state.items()}
    when, steps = rollout.commit_steps(), len(rollout.steps) - 1
    text = Text()
    for token, run in groupby(range(rollout.canvas_length), canvas.get):
        places = list(run)
        if token is None:
            text.append("·" * len(places), style="dim")
            continue
        many = len(places) > MOST_REPEATS
        for position in places[:1] if many else places:
            text.append(plain(token, colour_of(when[position], steps)))
        if many:
            text.append(f"×{len(places)}", style="dim")
    return text


def evidence_table(rollout: Rollout) -> Table:
    """The passages of the last step, new ones marked, then those that left with that step."""
    now = rollout.steps[-1].passage_ids
    before = rollout.steps[-2].passage_ids if len(rollout.steps) > 1 else ()
    table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
    table.add_column(width=1)
    table.add_column(no_wrap=True, max_width=16)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for name in now:
        fresh = name not in before
        row = ("+" if fresh else " ", plain(name), _title(rollout, name))
        table.add_row(*row, style="green" if fresh else "")
    for name in before:
        if name not in now:
            table.add_row("-", plain(name), _title(rollout, name), style="dim strike")
    return table


def progress_panel(rollout: Rollout) -> Panel:
    """One question while it is answered."""
    step = rollout.steps[-1]
    query = plain(f"query  {step.query or '(no refresh was due)'}", "italic")
    query.truncate(QUERY_LINES * 90, overflow="ellipsis")
    searched = "searched" if step.retrieved else "unchanged, not searched"
    tokens = f"{rollout.tokens_committed} of {rollout.canvas_length} tokens"
    return Panel(
        Group(canvas_text(rollout), Text(), query, evidence_table(rollout)),
        title=_heading(rollout),
        subtitle=f"step {step.step} · {tokens} · {searched}",
        box=box.ROUNDED,
        border_style="blue",
    )


def answer_panel(rollout: Rollout) -> Panel:
    """A finished question: what was written and when, the answer, and where each sentence is from."""
    answer = plain(rollout.answer, "bold") if rollout.answer else plain("none was marked", "dim")
    if rollout.error:
        answer = plain(rollout.error, "bold red")
    parts: list[RenderableType] = [canvas_text(rollout), Text(), Text("answer  ").append(answer)]
    sources = Table(box=None, show_header=False, padding=(0, 1))
    sources.add_column(no_wrap=True, max_width=46, overflow="ellipsis", style="dim")
    sources.add_column()
    for unit in rollout.citations:
        cited = [f"{p['id']} {_title(rollout, p['id'])} (step {p['step']})" for p in unit["passages"]]
        sources.add_row(plain(unit["text"]), plain("; ".join(cited) or "no passage holds these words"))
    parts += [Text("sources", style="dim"), sources] if rollout.citations else []
    if rollout.cut:
        parts.append(
            Text(
                f"cut to fit the context: {rollout.cut['tokens']} tokens of evidence, "
                f"{rollout.cut['passages_shortened']} passages shortened, "
                f"{rollout.cut['passages_dropped']} dropped",
                style="yellow",
            )
        )
    return Panel(
        Group(*parts),
        title=_heading(rollout),
        subtitle=f"{rollout.forwards} forwards · {rollout.tokens_committed} tokens · "
        f"{rollout.retrievals} retrievals",
        box=box.ROUNDED,
        border_style="green",
    )


class Tally:
    """Running totals of a run: it may answer more questions than fit into memory with their records."""

    def __init__(self) -> None:
        self.answers = self.forwards = self.tokens = self.failed = 0
        self.seconds: Counter[str] = Counter()

    def add(self, rollout: Rollout) -> None:
        self.answers += 1
        self.failed += bool(rollout.error)
        self.forwards += rollout.forwards
        self.tokens += rollout.tokens_committed
        self.seconds.update(without_nested(rollout.seconds))

    def line(self, wall_seconds: float, backend: str) -> str:
        """Answers/s, forwards per answer, tokens per forward, share of each stage, backend."""
        whole = sum(self.seconds.values()) or 1.0
        shares = [(name, value / whole) for name, value in self.seconds.most_common()]
        return " · ".join(
            [
                f"{self.answers / wall_seconds:.2f} answers/s",
                f"{self.forwards / max(self.answers, 1):.1f} forwards/answer",
                f"{self.tokens / max(self.forwards, 1):.2f} tokens/forward",
                ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005),
                backend,
                *([f"{self.failed} FAILED"] if self.failed else []),
            ]
        )


class LiveView:
    """Shows the questions in flight, and prints each when it is finished."""

    def __init__(self, console: Console) -> None:
        self._flying: dict[str, Rollout] = {}
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._shown = 0.0

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(Text(), refresh=True)
        self._live.__exit__(None, None, None)

    def step(self, rollout: Rollout) -> None:
        """Takes note of a step; draws at most 15 times a second."""
        self._flying[rollout.id] = rollout
        if perf_counter() - self._shown > 1 / 15:
            self._draw()

    def finish(self, rollout: Rollout) -> None:
        """Prints a finished question above those in flight."""
        self._flying.pop(rollout.id, None)
        self._live.console.print(answer_panel(rollout))
        self._draw()

    def _draw(self) -> None:
        panels = [progress_panel(rollout) for rollout in self._flying.values()]
        self._live.update(Group(*panels), refresh=True)
        self._shown = perf_counter()


def _title(rollout: Rollout, name: str) -> Text:
    """The first line of a passage; `Text`, for what stands in square brackets is no markup."""
    return plain(rollout.evidence_texts.get(name, "").strip().partition("\n")[0].strip('"'))


def _heading(rollout: Rollout) -> Text:
    return plain(fold(rollout.question)[:90], "bold")
