"""API keys: a file of them, and whose key a request brings."""

import logging
import stat
from hashlib import sha256
from pathlib import Path

from dlm_rag.errors import ConfigError
from dlm_rag.files.paths import resolve_regular_file

log = logging.getLogger(__name__)

MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512  # characters
MAX_KEYS_FILE_BYTES = 2**20  # bytes


class ApiKeys:
    """Keys by their digests, so that comparing one takes as long whatever it is."""

    def __init__(self, keys: list[str]) -> None:
        self._names = {_digest(key.encode()): f"key{number}" for number, key in enumerate(keys, start=1)}

    @classmethod
    def from_file(cls, path: str) -> "ApiKeys":
        """The keys of a file, one a line; blank lines and what begins with # are skipped.

        Warns of a file that every user of the machine can read. Raises `ConfigError` naming file and line.
        """
        found = resolve_regular_file(path, "keys file", ConfigError)
        if found.stat().st_mode & stat.S_IROTH:
            log.warning("%s can be read by every user of this machine: chmod o= %s", path, path)
        if found.stat().st_size > MAX_KEYS_FILE_BYTES:
            raise ConfigError(f"{path} is too large for a file of keys: {found.stat().st_size >> 20} MiB")
        keys: list[str] = []
        for number, raw in enumerate(Path(found).read_bytes().splitlines(), start=1):
            line = raw.decode("ascii", errors="replace").strip()
            if not line or line.startswith("#"):
                continue
            if (
                not MIN_KEY_CHARS <= len(line) <= MAX_KEY_CHARS
                or not line.isascii()
                or not line.isprintable()
            ):
                raise ConfigError(
                    f"{path}, line {number}: a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} letters, digits "
                    "and signs"
                )
            if " " in line:
                raise ConfigError(f"{path}, line {number}: a key holds no blank")
            keys.append(line)
        if not keys:
            raise ConfigError(f"{path} holds no keys: write one a line, or leave serving.api_keys_file out")
        return cls(keys)

    def find_key_name(self, authorization: str) -> str | None:
        """Whose key an `Authorization: Bearer KEY` brings; None for nobody's."""
        scheme, _, key = authorization.partition(" ")
        if scheme.casefold() != "bearer":
            return None
        return self._names.get(_digest(key.strip().encode()))


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
