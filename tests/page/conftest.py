"""One browser for all pages; what needs it is skipped where there is no Chromium."""

import pytest

from tests.support.headless_chromium import HeadlessChromium, find_chromium


@pytest.fixture(scope="package")
def shared_browser():
    if find_chromium() is None:
        pytest.skip("chromium is not here (apt-get install chromium)")
    with HeadlessChromium() as browser:
        yield browser


@pytest.fixture
def browser(shared_browser):
    """A browser whose console has nothing to say, neither before nor after a test."""
    shared_browser.complaints.clear()
    yield shared_browser
    assert shared_browser.complaints == []
