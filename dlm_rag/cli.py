"""What all programs share: exit codes, flags, words for the person, files that can be written."""

import argparse
import inspect
import io
import logging
import os
import re
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from dlm_rag.errors import ConfigError, RunError, UserError, summarize_error
from dlm_rag.progress import show_status
from dlm_rag.text import normalize_whitespace, replace_control_chars

# What torch says of full memory, of the host and of a device.
_NO_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)


class _StderrHandler(logging.StreamHandler):
    """Standard error as it is at the time: a bar puts itself in between, and a line goes above it."""

    def emit(self, record: logging.LogRecord) -> None:
        show_status()
        self.setStream(sys.stderr)
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return _sanitize_lines(super().format(record))


def run_program(main: Callable[[list[str]], None]) -> NoReturn:
    """Runs a program: exit code 2 for user errors, 1 for what else went wrong, both said in a sentence."""
    shown = _StderrHandler()
    shown.setLevel(logging.INFO)  # some libraries lower their own loggers to DEBUG
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[shown])
    logging.getLogger("dlm_rag").setLevel(logging.INFO)
    code = 0
    try:
        if sys.stdout is None or sys.stderr is None:  # a file would get the number of the stream
            raise ConfigError("standard output or error is closed: send it to a file, or to /dev/null")
        try:
            Path.cwd()
        except FileNotFoundError:
            raise ConfigError("the working folder is there no more: change into another") from None
        threads = os.environ.get("NUMBA_NUM_THREADS", "1")
        if not re.fullmatch("[1-9][0-9]{0,3}", threads):  # numba's own sentence does not name it
            raise ConfigError(f"NUMBA_NUM_THREADS={threads} in the environment is not a count: unset it")
        if isinstance(sys.stdout, io.TextIOWrapper):  # ASCII, say: text is shown with escapes
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            main(sys.argv[1:])
        finally:
            show_status()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print_note("interrupted")
        code = 130
    except Exception as error:
        if not (said := describe_expected_error(error)):
            raise
        code = 2 if isinstance(error, UserError) else 1
        if _drop_unwritable_output() and isinstance(error, BrokenPipeError):
            code = 0  # the reader went away (`| head`), of whom nothing is said
        else:
            print_note(f"error: {normalize_whitespace(replace_control_chars(said))}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        exit_rank(code)
    raise SystemExit(code)


def exit_rank(code: int = 0) -> NoReturn:
    """Ends a process of torchrun without what Python takes down, which threads of torch.distributed may
    outlive and then end in SIGABRT (pytorch issue 179291)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def describe_expected_error(error: Exception) -> str:
    """What is said of an error that is no fault of the program; nothing of one that is."""
    if isinstance(error, UserError | RunError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or summarize_error(error)}"
    full = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    if full or isinstance(error, MemoryError):
        reason = summarize_error(error)
        return f"the memory is full ({reason}): make batches smaller (decode.batch_size, say)"
    return ""


def _drop_unwritable_output() -> bool:
    """Whether standard output cannot be written any more; what is left for it is dropped then."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        sys.stdout.flush()
        if not poll.poll(0):  # its reader is there
            return False
    except (TypeError, ValueError):  # it is closed, or no file
        return False
    except OSError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the very end
    return True


def _sanitize_lines(text: str) -> str:
    """Lines for the person, without control characters of an id or a file name."""
    return "\n".join(map(replace_control_chars, text.split("\n")))


class CommandParser(argparse.ArgumentParser):
    """The parser of all programs: what is wrong with a word is a `ConfigError`."""

    def __init__(self, description: str, **more: Any) -> None:
        more |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(description=inspect.cleandoc(description), **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():
            if re.fullmatch("--[a-z-]+=--", word):  # of which argparse makes an empty list
                self.error(f"{word} gives no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the flags")


def parse_int(text: str, low: int = 1, flag: str = "", high: int = 10**18) -> int:
    """A whole number from `low` to `high` in a word. Raises `ConfigError` that begins with `flag`."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or not low <= int(text) <= high:
        bounds = f" from {low} to {high}" if high < 10**18 else f" above {low - 1}" if low else ""
        raise ConfigError(f"{flag}{text[:60]!r} is not a whole number{bounds}")
    return int(text)


def print_note(text: str, end: str = "\n") -> None:
    """For the person, not for the results: standard error."""
    show_status()
    print(_sanitize_lines(text), end=end, file=sys.stderr, flush=True)


def check_writable(path: str, key: str) -> None:
    """Raises `ConfigError` when the file `path` cannot be written; makes its folder."""
    if path == "-" or path.endswith("/"):
        raise ConfigError(f"{key}={path} is no file: name one (answers without --out are printed)")
    try:
        target = Path(os.path.realpath(path))  # of a link that leads nowhere, where it leads
        existed = target.exists()
        if existed and not target.is_file() and not target.is_dir():  # a pipe would wait for its reader
            raise OSError("it is no regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab"):
            pass
    except (OSError, ValueError) as error:  # a NUL byte is a ValueError
        reason = getattr(error, "strerror", None) or summarize_error(error)
        raise ConfigError(f"{key}={path} cannot be written: {reason}") from None
    if not existed:
        target.unlink(missing_ok=True)  # another process may have asked the same
