"""The book, page by page, as a reader without a network opens it."""

import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from conftest import PICTURES, ROOT

CHAPTERS = sorted(path.stem for path in ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))


@pytest.fixture(scope="session")
def book():
    """Built as `make book` does it: warnings, such as of links that lead nowhere, are errors."""
    done = subprocess.run(["make", "book"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build/book"


@pytest.fixture
def opened(page, book):
    """Opens a page, and notes what it asks for and complains of."""
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("requestfailed", lambda request: page.troubles.append(request.url))
    page.on("request", lambda request: request.url.startswith(("file:", "data:", "blob:"))
            or page.troubles.append(f"from the network: {request.url}"))

    def go(name):
        page.goto(f"file://{book}/{name}.html")
        return page

    return go


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_is_whole_and_asks_for_nothing_from_outside(opened, name):
    page = opened(name)
    notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4)
    page.wait_for_function("!document.querySelector('.math') || "
                           "document.querySelector('mjx-container')")
    assert not page.troubles
    assert page.locator("mjx-merror").count() == 0, "a formula that can't be read"
    assert page.title().startswith(name[:2])
    assert page.locator("article.bd-article h1").count() == 1
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert page.locator("div.cell_input").count() == len(code)
    texts = [output.metadata["image/png"]["alt"] for cell in code for output in cell.outputs
             if "image/png" in output.get("data", {})]
    shown = page.evaluate("[...document.querySelectorAll('.cell_output img')].filter("
                          "i => i.complete && i.naturalWidth > 300).map(i => i.alt)")
    assert shown == texts
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"the page is {wide} pixels wider than the window"
    cut = page.evaluate("[...document.querySelectorAll('article.bd-article pre')].filter("
                        "e => e.scrollWidth > e.clientWidth).map(e => e.innerText)")
    assert not cut, "code or outputs of which the end is out of sight"
    page.screenshot(path=PICTURES / f"book-{name}.png")


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_notebook_and_its_source_can_be_had(opened, book, name):
    page = opened(name)
    links = page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)")
    files = {Path(re.sub("^file://|[#?].*$", "", link)) for link in links
             if link.startswith("file:")}
    assert book / f"_sources/{name}.ipynb" in files
    assert book / f"{name}.py" in files
    assert not [str(path) for path in files if not path.exists()]
    assert (book / f"{name}.py").read_text() == (ROOT / f"notebooks/src/{name}.py").read_text()


def test_the_first_page_lists_every_chapter_once(opened):
    page = opened("index")
    links = page.locator(".toctree-wrapper a").all_inner_texts()
    assert [link[:2] for link in links] == [name[:2] for name in CHAPTERS]


def test_a_word_can_be_searched_for(opened):
    page = opened("search")
    page.goto(page.url + "?q=allreduce_grads")
    page.wait_for_selector("#search-results li")
    found = page.locator("#search-results li").all_inner_texts()
    assert any("KVStore" in text for text in found), found
