"""`make test-browser`: what a person sees. Needs Chromium, which is the system's (apt install
chromium); pictures of what was seen are kept in build/screenshots."""

import os
import shutil

import pytest
from places import PICTURES

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="session")
def chromium():
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if not path:
        pytest.skip("no Chromium here: apt install chromium")
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    # The driver brings its own Node; it must not look for browsers of its own.
    os.environ["PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD"] = "1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    page = chromium.new_page(viewport={"width": 1300, "height": 1000})
    yield page
    page.close()
