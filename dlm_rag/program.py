"""What all programs share: exit codes, words for the person, files that can be written."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dlm_rag.errors import ConfigError, RunError, UserError
from dlm_rag.progress import status


class _ToThePerson(logging.StreamHandler):
    """Standard error as it is at the time: a bar puts itself in between, and a line goes above it."""

    def emit(self, record: logging.LogRecord) -> None:
        status()
        self.setStream(sys.stderr)
        super().emit(record)


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a program: user errors are one sentence and exit code 2, Ctrl-C is exit code 130."""
    shown = _ToThePerson()
    shown.setLevel(logging.INFO)  # some libraries lower their own loggers to DEBUG
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[shown])
    logging.getLogger("dlm_rag").setLevel(logging.INFO)
    try:
        main(sys.argv[1:])
    except UserError as error:
        note(f"error: {' '.join(str(error).split())}")
        raise SystemExit(2) from None
    except RunError as error:
        note(f"error: {' '.join(str(error).split())}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        note("interrupted")
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader went away (`| head`); nothing more can be said on this stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(0)


def note(text: str, end: str = "\n") -> None:
    """For the person, not for the results: standard error."""
    status()
    print(text, end=end, file=sys.stderr, flush=True)


def check_writable(path: str, key: str) -> None:
    """Raises `ConfigError` when the file `path` cannot be written; leaves no new file behind."""
    target = Path(path)
    existed = target.exists()
    try:
        with target.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written: {error.strerror}") from None
    if not existed:
        target.unlink(missing_ok=True)  # another process may have asked the same
