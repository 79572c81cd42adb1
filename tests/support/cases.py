"""Parameters of tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_is_fast(values: Iterable[Any]) -> list[Any]:
    """Returns the first value, and the others marked slow; a tuple is a value for each argument."""
    first, *others = values
    rows = (each if isinstance(each, tuple) else (each,) for each in others)
    return [first, *(pytest.param(*row, marks=pytest.mark.slow) for row in rows)]
