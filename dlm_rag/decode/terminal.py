"""What a person sees in a terminal: the canvas filling in, the queries, the evidence, the answer."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from time import perf_counter, sleep
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dlm_rag.decode.rollout import ClosestPassage, Rollout, describe_abstention
from dlm_rag.energy import EnergyReading
from dlm_rag.nvtx_ranges import drop_nested_stages
from dlm_rag.progress import show_status
from dlm_rag.text import (
    clip_text,
    find_word_spans,
    fold_title,
    get_title_line,
    normalize_whitespace,
    replace_control_chars,
)

MAX_TOKEN_REPEATS = 3  # of a token in a row that are written out
# From the first commits (cool) to the last (warm).
STEP_COLOURS = ("#4fa3ff", "#38c6d9", "#3ddc97", "#a8e05f", "#f2d14b", "#ff9f45", "#ff6b6b")
NO_VERDICT = Text()  # on an answer
UNSUPPORTED_STYLE = "underline"  # words that no passage in context holds


def escape_text(text: str, style: str = "") -> Text:
    """Foreign text as it is: no markup, no control characters that move the cursor or ring the bell."""
    return Text(replace_control_chars(text), style=style)


def mark_words(text: str, words: Collection[str], style: str = "", mark: str = UNSUPPORTED_STYLE) -> Text:
    """Foreign text in a style, these of its words marked by another one."""
    shown = escape_text(text, style)
    for word, span in find_word_spans(text):
        if word in words:
            shown.stylize(mark, *span)
    return shown


def render_canvas(rollout: Rollout) -> Text:
    """The canvas, committed tokens coloured by their step, masked positions as dots.

    A token that stands many times in a row, as end tokens do, is shown once with its count.
    """
    canvas = {position: token.token for position, token in rollout.final_tokens().items()}
    when, steps = rollout.commit_steps(), len(rollout.steps) - 1
    text = Text(overflow="fold")
    for token, run in groupby(range(rollout.canvas_length), canvas.get):
        places = list(run)
        if token is None:
            text.append("·" * len(places), style="dim")
            continue
        many = len(places) > MAX_TOKEN_REPEATS
        for position in places[:1] if many else places:
            shade = (when[position] - 1) * len(STEP_COLOURS) // max(steps, 1)
            text.append(escape_text(token, STEP_COLOURS[min(shade, len(STEP_COLOURS) - 1)]))
        if many:
            text.append(f"×{len(places)}", style="dim")
    return text


def render_evidence(rollout: Rollout) -> Table:
    """The passages of the last step, new ones marked, then those that left with that step."""
    now = rollout.steps[-1].passage_ids
    before = rollout.steps[-2].passage_ids if len(rollout.steps) > 1 else ()
    table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
    table.add_column(width=1)
    table.add_column(no_wrap=True, max_width=16)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    marks = [(" ", "") if name in before else ("+", "green") for name in now]
    gone = [name for name in before if name not in now]
    marks += [("-", "dim strike")] * len(gone)
    for (mark, style), name in zip(marks, (*now, *gone), strict=True):
        table.add_row(mark, escape_text(name), _title(rollout, name), style=style)
    return table


def render_progress(rollout: Rollout) -> Panel:
    step = rollout.steps[-1]
    query = Text(f"query  {clip_text(step.query or '(no refresh was due)')}", "italic")
    searched = "searched" if step.retrieved else "unchanged, not searched"
    tokens = f"{rollout.tokens_committed} of {rollout.canvas_length} tokens"
    parts = (render_canvas(rollout), Text(), query, render_evidence(rollout))
    return _panel(rollout, parts, f"step {step.step} · {tokens} · {searched}", "blue")


def render_answer(rollout: Rollout, verdict: Text = NO_VERDICT) -> Panel:
    """A finished question: what was written and when, the answer, and where each sentence is from; verdict:
    what stands behind the answer, a tick, say."""
    answer = _render_answer_text(rollout).append_text(verdict)
    parts: list[RenderableType] = [render_canvas(rollout), Text(), Text("answer  ").append(answer)]
    parts += map(_render_closest, rollout.closest)
    if rollout.citations:
        told = rollout.sources
        sources = Table(box=None, show_header=False, padding=(0, 1))
        sources.add_column(no_wrap=True, max_width=46, overflow="ellipsis", style="dim")
        sources.add_column()
        for unit in {(unit["kind"], unit["text"]): unit for unit in rollout.citations}.values():
            named = [p for p in unit["passages"] if p["id"] in told]
            cited = [f"{p['id']} {_title(rollout, p['id'])} (step {p['step']})" for p in named]
            said = "; ".join(cited) or "no passage holds these words" * bool(unit["unsupported"])
            sources.add_row(mark_words(unit["text"], unit["unsupported"]), escape_text(said))
        parts += [Text("sources", style="dim"), sources]
    if any(unit["unsupported"] for unit in rollout.citations):
        parts.append(Text.assemble(("underlined", UNSUPPORTED_STYLE), ": no passage in context held it"))
    if cut := rollout.cut:
        lost = f"passages shortened: {cut['passages_shortened']}, dropped: {cut['passages_dropped']}"
        parts.append(Text(f"cut to fit the context: {cut['tokens']} tokens of evidence, {lost}", "yellow"))
    counts = f"{rollout.forwards} forwards · {rollout.tokens_committed} tokens"
    return _panel(rollout, parts, f"{counts} · {rollout.retrievals} retrievals", "green")


def render_verdict(right: bool, golden_answers: Sequence[str]) -> Text:
    """A tick behind a right answer, a known one behind another; nothing where none is known."""
    if right or not golden_answers:
        return Text(" ✓" * right, "bold green")
    return escape_text(f" (known answer: {golden_answers[0]})", "dim")


def _render_answer_text(rollout: Rollout) -> Text:
    """The answer, or what there is in place of one."""
    unheld = {unit["kind"]: unit["unsupported"] for unit in rollout.citations}.get("answer", ())
    if rollout.error:
        return escape_text(rollout.error, "bold red")
    if reason := rollout.abstain_reason:
        return Text(describe_abstention(reason, rollout.closest), "bold yellow")
    if rollout.answer:
        return mark_words(rollout.answer, unheld, "bold red" if unheld else "bold")
    return escape_text("none was marked", "dim")


def render_reply(rollout: Rollout) -> Group:
    """The answer on a line, below it the titles of its sources, or the closest passages."""
    titles = [fold_title(rollout.passages[name]) or name for name in rollout.sources]
    listed = [escape_text(f"[{n}] {title}", "dim") for n, title in enumerate(titles, start=1)]
    return Group(_render_answer_text(rollout), *([*map(_render_closest, rollout.closest)] or listed))


def render_sources(rollout: Rollout) -> RenderableType:
    """The passages from which an answer is cited, whole, the words that it took in bold."""
    parts: list[RenderableType] = []
    for number, name in enumerate(rollout.sources, start=1):
        cited = [p for unit in rollout.citations for p in unit["passages"] if p["id"] == name]
        taken, text = {word for each in cited for word in each["words"]}, rollout.passages[name].strip()
        parts.append(escape_text(f"[{number}] {name}", "dim"))
        parts += [mark_words(line, taken, mark="bold green") for line in (*text.splitlines(), "")]
    return Group(*parts) if parts else Text("no passage holds its words", "dim")


def render_steps(rollout: Rollout) -> Table:
    """What every step wrote, searched for and read: new passages by their titles."""
    table, seen, said = Table(box=None, padding=(0, 1), header_style="dim"), set[str](), rollout.response
    heads = {"step": "dim", "wrote": "bold", "searched for, after the question": "italic", "read anew": ""}
    for head, style in heads.items():
        table.add_column(head, style=style, overflow="fold")
    for step in rollout.steps:
        new = [name for name in step.passage_ids if name not in seen]
        seen.update(new)
        titles = [fold_title(rollout.passages[name]) or name for name in new]
        tokens = sorted(step.written_tokens, key=lambda token: token.position)
        runs = groupby(enumerate(tokens), lambda pair: pair[1].position - pair[0])
        # End tokens, which come in a row, once: the response does not have them.
        once = (groupby(run, lambda p: p[0] if p[1].token in said else p[1].token) for _, run in runs)
        written = " … ".join("".join(next(same)[1].token for _, same in each).strip() for each in once)
        asked = step.query or ""
        if step.step:
            asked = asked.removeprefix(rollout.question).strip() if step.retrieved else "(not again)"
        table.add_row(*map(escape_text, (str(step.step), written, asked, "; ".join(titles))))
    return table


def _render_closest(found: ClosestPassage) -> Text:
    """A passage that the question is close to, its best sentence in bold."""
    head = escape_text(f"{found['id']} {normalize_whitespace(found['title'])}: ", "dim")
    return head.append_text(escape_text(found["sentence"], "bold"))


def _panel(rollout: Rollout, parts: Iterable[RenderableType], subtitle: str, colour: str) -> Panel:
    title = Text(clip_text(rollout.question), "bold")
    return Panel(Group(title, Text(), *parts), subtitle=subtitle, border_style=colour)


def _title(rollout: Rollout, name: str) -> Text:
    """The first line of a passage; `Text`, for what stands in square brackets is no markup."""
    return escape_text(get_title_line(rollout.evidence_texts.get(name, "")))


class RunTotals:
    """Running totals of a run: it may answer more questions than fit into memory with their records."""

    def __init__(self) -> None:
        self.answers = self.forwards = self.tokens = self.failed = 0
        self.cut_answers = self.cut_tokens = 0  # tokens of passages that were longer than what is read
        self.seconds: Counter[str] = Counter()
        self._start, self.paused_seconds = perf_counter(), 0.0  # not counted among those of the wall clock
        self.wall_seconds, self.summary = 0.0, ""  # of all, as is the energy: once it has ended
        self.energy: dict[str, Any] | None = None

    def add(self, rollout: Rollout) -> None:
        self.answers += 1
        self.failed += bool(rollout.error)
        cut = rollout.cut.get("tokens", 0)
        self.cut_answers += cut > 0
        self.cut_tokens += cut
        self.forwards += rollout.forwards
        self.tokens += rollout.tokens_committed
        self.seconds.update(drop_nested_stages(rollout.seconds))

    def close(self, backend: str, reading: EnergyReading) -> None:
        """Ends the run: its seconds, its energy with what it was spent on (None where nobody asked for it),
        and a summary: questions, forwards and tokens, share of each stage, backend, energy."""
        wall_seconds = self.wall_seconds = perf_counter() - self._start - self.paused_seconds
        record = reading.to_record()
        self.energy = record and record | {"answers": self.answers - self.failed}
        whole = sum(self.seconds.values()) or 1.0
        shares = [(name, value / whole) for name, value in self.seconds.most_common()]
        spent = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        failed = f", {self.failed} failed" if self.failed else ""
        parts = [
            f"{self.answers} question{'s' * (self.answers != 1)} in {wall_seconds:.1f} s{failed}",
            f"{self.answers / wall_seconds:.2f} answers/s",
            f"{self.forwards / max(self.answers, 1):.1f} forwards/answer",
            f"{self.tokens / max(self.forwards, 1):.2f} tokens/forward",
            f"passages cut for {self.cut_answers}: {self.cut_tokens:,} tokens not read"
            * bool(self.cut_answers),
            f"time: {spent}" if spent else "",
            backend,
            reading.describe(answer=self.answers),
        ]
        self.summary = " · ".join(part for part in parts if part)


class LiveView:
    """Shows the first question in flight, and prints each when it is finished.

    speed: steps a second of the first; 0: as fast as it is decoded. paused_seconds: spent on that.
    """

    def __init__(self, console: Console, speed: float = 0) -> None:
        self._speed, self._slow_id, self.paused_seconds = speed, "", 0.0
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
        self._slow_id = self._slow_id or rollout.id
        if self._speed and rollout.id == self._slow_id:
            self._draw()
            sleep(1 / self._speed)
            self.paused_seconds += 1 / self._speed
        elif perf_counter() - self._shown > 1 / 15:
            self._draw()

    def finish(self, rollout: Rollout, verdict: Text = NO_VERDICT) -> None:
        """Prints a finished question above those in flight."""
        self._flying.pop(rollout.id, None)
        show_status()
        self._live.console.print(render_answer(rollout, verdict))
        self._draw()

    def _draw(self) -> None:
        show_status()
        first, more = [*self._flying.values()][:1], len(self._flying) - 1
        rest = [Text(f"and {more} more", "dim")] if more > 0 else []
        self._live.update(Group(*map(render_progress, first), *rest), refresh=True)
        self._shown = perf_counter()
