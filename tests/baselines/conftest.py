"""The scripted server is there for all tests of this folder."""

from tests.support.chat_server import server  # noqa: F401
