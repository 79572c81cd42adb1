"""Draws the pictures of docs/tutorials/idea.md, from decodings of the shipped model.

    python docs/idea_pictures.py                  # about a minute on one core
    python docs/idea_pictures.py --only loop      # or: race, recall

loop.png: what a step does. race.webp: one question with a search at every step, and with one search.
recall.png: the share of the needed passages in the evidence after each step, over the shipped questions.
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.font_manager import findfont
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image, ImageDraw, ImageFont

from dlm_rag import Decoder, Denoiser, Tokenizer, load_retriever
from dlm_rag.cli import run_program
from dlm_rag.commands.arguments import CommandParser
from dlm_rag.config import DecodeConfig
from dlm_rag.decode.rollout import Rollout
from dlm_rag.questions import Question, read_questions

ROOT = Path(__file__).parents[1]
MODEL, WORLD = ROOT / "dlm_rag/shipped/model", ROOT / "dlm_rag/shipped/world"
ASKED = "q230"  # three hops, the question of the README
SHOWN = 64  # positions of the canvas, of 96
TITLES = {"proxy": "A search at every step", "question": "One search, with the question"}
INK, GREY, PALE, WHITE = "#1c2430", "#6b7480", "#d5dae0", "#ffffff"
BLUE, GREEN, PURPLE, RED = "#c9defa", "#2e7d4f", "#7b3fa0", "#b3372f"
COLOURS = {"proxy": "#2e6fbf", "question": "#c8782a"}


def decode(questions: Sequence[Question], policy: str) -> list[Rollout]:
    """The questions answered by the shipped model, guesses recorded."""
    decoder = Decoder(
        Denoiser.from_pretrained(MODEL),
        load_retriever(WORLD / "corpus.jsonl"),
        Tokenizer.from_pretrained(MODEL),
        DecodeConfig(query_policy=policy, batch_size=16),
    )
    decoder.record_provisional = True
    return decoder.decode(questions)


def draw_canvas(axis: Axes) -> None:
    """Three blocks of the canvas: finished, current, next."""
    for cell in range(24):
        x, colour = 2 + 2.8 * cell + 1.4 * (cell // 8), BLUE if cell < 12 else WHITE
        axis.add_patch(Rectangle((x, 4.5), 2.4, 3.6, fc=colour, ec=GREY, lw=0.8))
    axis.add_patch(Rectangle((25.2, 3.9), 23.2, 4.8, fill=False, ec=GREEN, lw=2))
    for x, text in (
        (13, "finished block: committed"),
        (36.8, "current block"),
        (60.6, "next block: masks"),
    ):
        axis.text(x, 2, text, ha="center", va="center", fontsize=9, color=GREEN if x == 36.8 else INK)


def draw_loop(path: Path) -> None:
    """The loop of a step, as boxes and arrows."""
    figure, axis = pyplot.subplots(figsize=(8.4, 5.2))
    axis.set(xlim=(0, 74), ylim=(0, 47))
    axis.axis("off")
    boxes = [
        (1, 21, 18, 10, "prompt", "evidence + question"),
        (25, 21, 15, 10, "denoiser", "one forward"),
        (46, 21, 18, 10, "proposals", "a token and its\nconfidence per mask"),
        (46, 36, 27, 10, "query", "question + committed\ntokens + guesses"),
        (25, 36, 15, 10, "retriever", "finds passages"),
        (0.5, 0.3, 73, 13, "canvas", ""),
    ]
    for x, y, width, height, title, text in boxes:
        style = "round,pad=0,rounding_size=1.5"
        axis.add_patch(FancyBboxPatch((x, y), width, height, style, fc="#eef3fa", ec="#2e6fbf"))
        middle = x + width / 2
        axis.text(middle, y + height - 2.5, title, ha="center", va="center", weight="bold", color=INK)
        axis.text(middle, y + 3.3, text, ha="center", va="center", fontsize=9, color=INK)
    draw_canvas(axis)
    arrows = [
        ((19.5, 26), (24.5, 26), INK),
        ((32.5, 13.7), (32.5, 20.5), INK),
        ((40.5, 26), (45.5, 26), INK),
        ((47.5, 20.5), (47.5, 9.2), GREEN),
        ((55, 31.5), (55, 35.5), PURPLE),
        ((71, 13.7), (71, 35.5), PURPLE),
        ((45.5, 41), (40.5, 41), PURPLE),
        ((24.5, 41), (10, 31.5), PURPLE),
    ]
    for start, end, colour in arrows:
        axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.3})
    labels = [
        (48.5, 17.2, "commit: confidence\n≥ 0.9, or the surest", GREEN, "left"),
        (56, 33.5, "guesses", PURPLE, "left"),
        (15, 39, "new evidence", PURPLE, "right"),
    ]
    for x, y, text, colour, side in labels:
        axis.text(x, y, text, color=colour, ha=side, va="center", fontsize=9)
    axis.text(71.7, 24.5, "committed tokens", color=PURPLE, rotation=90, ha="left", va="center", fontsize=9)
    figure.savefig(path, dpi=160, bbox_inches="tight", facecolor=WHITE)
    pyplot.close(figure)


def plot_recall(path: Path, questions: Sequence[Question], rollouts: dict[str, list[Rollout]]) -> None:
    """Mean evidence recall after each step, a panel for each number of hops."""
    last = 12
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, hops in zip(axes, (2, 3, 4), strict=True):
        for policy, answers in rollouts.items():
            curves = []
            for question, rollout in zip(questions, answers, strict=True):
                if question.hops == hops:
                    needed = set(question.supporting_ids)
                    found = [len(needed & set(step.passage_ids)) / len(needed) for step in rollout.steps]
                    curves.append((found + found[-1:] * last)[: last + 1])
            means = [100 * fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(means, marker="o", ms=3.5, color=COLOURS[policy], label=TITLES[policy].lower())
        axis.set_title(f"{hops} hops, {len(curves)} questions", loc="left", fontsize=10)
        axis.set(ylim=(0, 103), xlabel="step", xticks=range(0, last + 1, 2))
        axis.grid(axis="y", color=PALE)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("needed passages in\nthe evidence, %")
    axes[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=160, facecolor=WHITE)
    pyplot.close(figure)


class Pen:
    """Writes words of several styles into a column of a picture, wrapped."""

    def __init__(self, image: Image.Image, left: int, top: int, width: int) -> None:
        self.draw, self.left, self.x, self.y, self.width = ImageDraw.Draw(image), left, left, top, width

    @staticmethod
    def font(size: int, style: str = "") -> ImageFont.FreeTypeFont:
        weight, slant = "bold" if style == "bold" else "normal", "italic" if style == "italic" else "normal"
        return ImageFont.truetype(findfont(f"DejaVu Sans:weight={weight}:slant={slant}"), size)

    def write(
        self, text: str, size: int = 26, style: str = "", colour: str = INK, back: str = "", room: str = ""
    ) -> None:
        """One piece of text; on the next line where `room`, it and what belongs to it, does not fit.

        back: its background.
        """
        font, line = self.font(size, style), round(size * 1.55)
        length = self.draw.textlength(text, font)
        if self.x + self.draw.textlength(room or text, font) > self.left + self.width:
            self.x, self.y, text = self.left, self.y + line, text.lstrip()
            length = self.draw.textlength(text, font)
        if back:
            self.draw.rectangle((self.x, self.y - 3, self.x + length, self.y + size + 7), back)
        self.draw.text((self.x, self.y), text, colour, font)
        self.x += round(length)

    def end_line(self, gap: int) -> None:
        self.x, self.y = self.left, self.y + gap


def draw_side(
    image: Image.Image, left: int, policy: str, rollout: Rollout, number: int, needed: dict[str, str]
) -> None:
    """A column after step `number`, or after the last one; needed: titles of passages by id."""
    number = min(number, len(rollout.steps) - 1)
    step, tokens = rollout.steps[number], list(rollout.replay())[number]
    guesses = list(rollout.provisional_tokens())[number]
    pen = Pen(image, left, 24, 730)
    pen.write(TITLES[policy], 30, "bold", COLOURS[policy])
    pen.end_line(52)
    pen.write(f"step {number}, {len(tokens)} tokens committed", 22, colour=GREY)
    pen.end_line(50)
    pen.write("CANVAS", 20, "bold", GREY)
    pen.end_line(36)
    fresh = {token.position for token in step.committed}
    pieces: list[tuple[str, dict[str, str]]] = []
    for position in range(SHOWN):
        if position in tokens:
            pieces.append((tokens[position].token, {"back": BLUE if position in fresh else ""}))
        elif position in guesses:
            pieces.append((guesses[position].token, {"style": "italic", "colour": PURPLE}))
        else:
            pieces.append((" ·", {"colour": GREY}))
    pieces = [(text, look) for text, look in pieces if text != "<end>"]
    for number_of_piece, (text, look) in enumerate(pieces):
        rest = takewhile(lambda piece: piece[0][:1] != " ", pieces[number_of_piece + 1 :])
        pen.write(text, room=text + "".join(piece[0] for piece in rest), **look)
    pen.y = 330
    pen.end_line(0)
    pen.write("QUERY", 20, "bold", GREY)
    pen.write("  the question", 22, colour=GREY)
    pen.end_line(36)
    added = (step.query or "").removeprefix(rollout.question).strip()
    for word in ("+ " + added if added else "and nothing else").split():
        pen.write(word + " ", 22, colour=INK if added else GREY)
    pen.y = 500
    pen.end_line(0)
    pen.write("EVIDENCE", 20, "bold", GREY)
    pen.write("  the three passages that are needed, of seven", 22, colour=GREY)
    pen.end_line(42)
    for passage, title in needed.items():
        here = passage in step.passage_ids
        circle = (left + 2, pen.y + 4, left + 24, pen.y + 26)
        pen.draw.ellipse(circle, GREEN if here else WHITE, GREEN if here else GREY, 2)
        pen.x += 40
        pen.write(title, 24, "bold" if here else "", INK if here else GREY)
        pen.end_line(40)
    if number == len(rollout.steps) - 1:
        pen.y += 8
        right = bool(rollout.answer)
        pen.write(f"{rollout.forwards} forwards: ", 24, "bold")
        pen.write(rollout.written_answer, 24, "bold", GREEN if right else RED)


def draw_race(path: Path, question: Question, rollouts: dict[str, Rollout]) -> None:
    """Both decodings of one question, step by step."""
    found = next(iter(rollouts.values())).passages
    needed = {passage: found[passage].partition("\n")[0] for passage in question.supporting_ids}
    frames = []
    for number in range(max(len(rollout.steps) for rollout in rollouts.values())):
        frame = Image.new("RGB", (1600, 740), WHITE)
        for left, (policy, rollout) in zip((40, 830), rollouts.items(), strict=True):
            draw_side(frame, left, policy, rollout, number, needed)
        ImageDraw.Draw(frame).line((800, 20, 800, 720), PALE, 2)
        frames.append(frame)
    seconds = [1300 if n <= rollouts["proxy"].forwards else 350 for n in range(len(frames) - 1)]
    durations = [*seconds, 5000]
    frames[0].save(
        path, lossless=True, method=6, save_all=True, append_images=frames[1:], duration=durations, loop=0
    )


def main(argv: list[str]) -> None:
    parser = CommandParser(__doc__ or "")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images", help="folder")
    parser.add_argument("--only", choices=("loop", "race", "recall"))
    given = parser.parse_args(argv)
    questions = read_questions(WORLD / "questions.jsonl")
    if given.only in (None, "loop"):
        draw_loop(given.out / "loop.png")
    if given.only in (None, "race"):
        (asked,) = (question for question in questions if question.id == ASKED)
        draw_race(given.out / "race.webp", asked, {policy: decode([asked], policy)[0] for policy in TITLES})
    if given.only in (None, "recall"):
        plot_recall(
            given.out / "recall.png", questions, {policy: decode(questions, policy) for policy in TITLES}
        )


if __name__ == "__main__":
    run_program(main)
