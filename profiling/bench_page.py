"""How long a trace page takes to open, and to go from step to step, in a real browser.

    python profiling/bench_page.py [STEPS]

A synthetic trace writes a token at each step, guesses at all others, asks with what it has written, and
replaces one passage of seven. The confidence of every guess changes at every step, every tenth gets another
token. Expectation: a step costs what changes with it, and the layout of a canvas of that length. The
seconds of the page's own thread do not depend on what else runs on the machine; those of the clock do.
"""

import tempfile
from pathlib import Path

import numpy as np
from headless_chromium import HeadlessChromium
from numpy.typing import NDArray

from dlm_rag.cli import run_program
from dlm_rag.commands.cli_args import parse_int_args
from dlm_rag.decode.provisional_log import ProvisionalDelta, ProvisionalRecorder
from dlm_rag.decode.rollout import CommittedToken, Rollout, RolloutStep
from dlm_rag.diffusion.commit_rules import Proposals
from dlm_rag.page.record import TraceRun
from dlm_rag.page.write import write_page

PASSAGES_PER_STEP = 7  # passages of a step
# Milliseconds of so many moves from a step on, by so many steps each, with style and layout done.
STEP_TIMING_SCRIPT = """(() => {
  const [first, by, count] = [%d, %d, %d], spent = [];
  page.go(first);
  for (let n = 1; n <= count; n++) {
    const begun = performance.now();
    page.go(first + by * n);
    document.body.offsetHeight;
    spent.push(performance.now() - begun);
  }
  return spent.sort((one, other) => one - other);
})()"""


def make_synthetic_rollout(steps: int, tokens: int) -> Rollout:
    """A rollout that writes its tokens out of order, one a step."""
    recorder = ProvisionalRecorder(lambda token: f" guess{token}")
    places = [number * 7919 % tokens for number in range(tokens)]  # a prime, so each of them once
    written = [CommittedToken(place, 2, f" word{place}", (place % 100) / 100) for place in places]
    asked = "Why?"
    taken = [RolloutStep(0, asked, tuple(f"p{n}" for n in range(PASSAGES_PER_STEP)), True)]
    for number in range(1, steps + 1):
        part = tuple(written[(number - 1) * tokens // steps : number * tokens // steps])
        asked += "".join(token.token for token in part)
        found = tuple(f"p{number + n}" for n in range(PASSAGES_PER_STEP))
        left = np.array(sorted(places[number * tokens // steps :]), dtype=np.int64)
        taken.append(
            RolloutStep(
                number, asked, found, True, part, guesses=make_provisional_tokens(recorder, left, number)
            )
        )
    names = [f"p{n}" for n in range(steps + PASSAGES_PER_STEP)]
    return Rollout(
        id="synthetic",
        question="Why?",
        prompt_layout="joint",
        canvas_length=tokens,
        steps=taken,
        response="".join(f" word{n}" for n in range(tokens)).strip(),
        passages={name: f"Title {name}\n" + "some words of a passage " * 20 for name in names},
        settings={"query_policy": "proxy", "query_threshold": 0.0},
        finished=True,
    )


def make_provisional_tokens(
    recorder: ProvisionalRecorder, positions: NDArray[np.int64], step: int
) -> ProvisionalDelta:
    """Guesses of which a tenth are others than a step before, and all are more or less sure."""
    none = np.zeros(len(positions))
    token = (7 * positions + (positions + step) // 10) % 5000
    return recorder.record_step(
        Proposals(positions, token, (37 * positions + 11 * step) % 100 / 100, none, none, none, none)
    )


def main(argv: list[str]) -> None:
    (steps,) = parse_int_args(__doc__ or "", argv, "steps, and tokens", [1000])
    with tempfile.TemporaryDirectory() as folder, HeadlessChromium() as browser:
        path = Path(folder) / "page.html"
        write_page(path, [TraceRun("", None, [make_synthetic_rollout(steps, steps)])])
        print(f"{steps} steps of {steps} tokens: {path.stat().st_size / 1e6:.1f} MB of HTML")
        browser.open(path, width=1440, height=900)
        opened = browser.run("performance.getEntriesByType('navigation')[0].duration")
        print(f"opened in {opened:.0f} ms")
        browser.call("Performance.enable")
        for what, words in {
            "a step on": (steps // 2, 1, steps // 4),
            "a step back": (steps // 2, -1, steps // 4),
            "a leap of a tenth": (0, steps // 10, 10),
            "from one end to the other": (0, steps, 1),
        }.items():
            before = read_page_thread_ms(browser)
            spent = browser.run(STEP_TIMING_SCRIPT % words)
            own = (read_page_thread_ms(browser) - before) / len(spent)
            middle, late = spent[len(spent) // 2], spent[int(len(spent) * 0.99)]
            clock = f"by the clock {middle:.1f} ms (median), {late:.1f} ms (99 %)"
            print(f"{what}: {own:.1f} ms of its thread; {clock}")


def read_page_thread_ms(browser: HeadlessChromium) -> float:
    """What the thread of the page has computed so far."""
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return 1e3 * float(next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime"))


if __name__ == "__main__":
    run_program(main)
