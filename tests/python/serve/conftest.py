"""Fixtures of the tests of the web page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import make_engine
from serving import serving
from web_tab import Tab

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox needs privileges that containers lack.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    engine = make_engine(step_seconds=0.01, session_len=4096)
    engine.running.core.cache_tokens = 4096
    with serving(engine) as url:
        yield url


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Any]:
    tabs: list[Tab] = []

    def open_one(url: str, **options: Any) -> Tab:
        tabs.append(Tab(browser, url, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()
