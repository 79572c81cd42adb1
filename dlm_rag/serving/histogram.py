"""A histogram of durations, in the text form that Prometheus reads."""

from bisect import bisect_left
from itertools import accumulate

BUCKET_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


class Histogram:
    """How many durations were up to each of `BUCKET_SECONDS`, and their sum."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(BUCKET_SECONDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Takes one duration up."""
        self._counts[bisect_left(BUCKET_SECONDS, seconds)] += 1
        self._sum += seconds

    def render(self, name: str, words: str) -> list[str]:
        """The lines of a histogram; words: its help."""
        bounds = [*map(str, BUCKET_SECONDS), "+Inf"]
        upto = [*accumulate(self._counts)]
        return [
            f"# HELP {name} {words}",
            f"# TYPE {name} histogram",
            *(f'{name}_bucket{{le="{bound}"}} {n}' for bound, n in zip(bounds, upto, strict=True)),
            f"{name}_sum {self._sum}",
            f"{name}_count {upto[-1]}",
        ]
