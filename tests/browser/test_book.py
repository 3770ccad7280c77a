"""The book, page by page, as a reader without a network opens it."""

import re
import subprocess
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import PICTURES, ROOT

CHAPTERS = sorted(path.stem for path in ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))
TELEPHONE = {"width": 390, "height": 844}

# Lines of code that go on below no further in than they began. Only one that begins close to the
# right edge may.
BADLY_WRAPPED = """() => [...document.querySelectorAll('.cell_input .line')].filter(line => {
    const text = line.textContent, range = document.createRange()
    const width = line.appendChild(document.createElement('span'))
    width.textContent = 'x'.repeat(10)
    const column = width.getBoundingClientRect().width / 10
    width.remove()
    range.selectNodeContents(line)
    const boxes = [...range.getClientRects()].filter(box => box.width)
    if (!boxes.length) return false
    const begin = boxes[0].left + column * text.search(/\\S/)
    return boxes.some(box => box.top > boxes[0].bottom - 1 && box.left < begin + column)
        && begin < innerWidth / 2
}).map(line => line.textContent)"""


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
    page.on("console", lambda message: message.type in ("error", "warning")
            and page.troubles.append(message.text))
    page.on("requestfailed", lambda request: request.failure == "net::ERR_ABORTED"  # page was left
            or page.troubles.append(f"{request.url}: {request.failure}"))
    page.on("request", lambda request: request.url.startswith(("file:", "data:", "blob:"))
            or page.troubles.append(f"from the network: {request.url}"))

    def go(name):
        page.goto(f"{book.as_uri()}/{name}")
        return page

    yield go
    assert not page.troubles


def read(name):
    return nbformat.read(ROOT / f"notebooks/{name}.ipynb", 4)


def answers(notebook):
    """The cells of the answers, each with its heading; the last cell leads to other chapters."""
    sources = [cell.source for cell in notebook.cells]
    first = next(n for n, source in enumerate(sources) if source.startswith("### Answer"))
    return notebook.cells[first:-1]


def seen(page, selector):
    """The texts of those elements that a reader sees."""
    return page.locator(selector).evaluate_all(
        "all => all.filter(e => e.checkVisibility()).map(e => e.textContent.trim())")


@pytest.fixture(scope="session")
def pages(book):
    return {path.name: BeautifulSoup(path.read_text("utf-8"), "html.parser")
            for path in book.glob("*.html")}


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_is_whole_and_asks_for_nothing_from_outside(opened, name):
    page = opened(f"{name}.html")
    notebook = read(name)
    page.wait_for_function("!document.querySelector('.math') || "
                           "document.querySelector('mjx-container')")
    assert page.locator("mjx-merror").count() == 0, "a formula that can't be read"
    assert page.title().startswith(name[:2])
    assert page.locator("article.bd-article h1").count() == 1
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = page.locator("div.cell_input pre").evaluate_all("all => all.map(e => e.textContent)")
    assert [text.strip("\n") for text in shown] == [cell.source.strip("\n") for cell in code]
    texts = [output.metadata["image/png"]["alt"] for cell in code for output in cell.outputs
             if "image/png" in output.get("data", {})]
    assert not seen(page, "article details > div"), "an answer that is not folded"
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert len(seen(page, "article details > div")) == page.locator("details summary").count()
    shown = page.evaluate("[...document.querySelectorAll('.cell_output img')].filter("
                          "i => i.complete && i.naturalWidth > 300).map(i => i.alt)")
    assert shown == texts
    for size in (page.viewport_size, TELEPHONE):
        page.set_viewport_size(size)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"the page is {wide} pixels wider than the window"
        cut = page.evaluate("[...document.querySelectorAll('article.bd-article pre')].filter("
                            "e => e.scrollWidth > e.clientWidth).map(e => e.innerText)")
        assert not cut, "code or outputs of which the end is out of sight"
        assert not page.evaluate(BADLY_WRAPPED), "lines that lose their indentation"
        assert len(seen(page, ".search-button__button, .bd-search")) == 1
        page.screenshot(path=PICTURES / f"book-{name}-{size['width']}.png")


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_page_has_the_parts_of_its_chapter_once(pages, name):
    page = pages[f"{name}.html"]
    cells = answers(read(name))
    folded = page.select("article details.answer")
    assert [each.summary.text for each in folded] == [
        cell.source.split("\n")[0].lstrip("# ") for cell in cells
        if cell.source.startswith("### Answer")]
    code = [cell for cell in cells if cell.cell_type == "code"]
    for kind, number in (("input", len(code)), ("output", sum(bool(c.outputs) for c in code))):
        assert len(page.select(f"article details div.cell_{kind}")) == number
        assert not page.select(f"article details ~ div.cell div.cell_{kind}")
    headings = [each.text.rstrip("#") for each in page.select("article h2")]
    contents = [each.text for each in page.select("#pst-page-toc-nav a")]
    assert [each for each in contents if each in headings] == headings
    assert not [each for each in contents if each.startswith("Answer")]
    assert headings[-1] == "Exercises", "a notebook's own links to its neighbours"
    around = ["index", *CHAPTERS, "map"][CHAPTERS.index(name):][:3:2]
    assert [link["href"] for link in page.select("a.left-prev, a.right-next")] == [
        f"{each}.html" for each in around]


def test_answers_are_printed_and_a_link_into_one_opens_it(opened):
    page = opened(f"{CHAPTERS[0]}.html")
    inside = page.locator("article details > div")
    showing = "all => all.map(each => each.checkVisibility())"
    assert not any(inside.evaluate_all(showing))
    page.emulate_media(media="print")
    assert all(inside.evaluate_all(showing))
    page.emulate_media(media="screen")
    page = opened(f"{CHAPTERS[0]}.html#answer-2")
    page.wait_for_function("document.querySelector('details[open]')")
    assert inside.evaluate_all(showing)[:3] == [False, True, False]


def test_no_link_is_dead(pages, book):
    links = {name: {each.get("href") or each.get("src") for each in page.select("[href], [src]")}
             for name, page in pages.items()}
    names = {name: {each["id"] for each in page.select("[id]")} for name, page in pages.items()}
    dead = []
    for name in pages:
        for link in links[name]:
            file, _, part = unquote(link).partition("#")
            file = file.split("?")[0] or name
            if file.startswith(("http:", "https:")):
                continue
            if not (book / file).exists() or (part and part not in names[file]):
                dead.append((name, link))
    assert not dead
    # It was looked at, too: notebooks to download, their sources, other chapters, parts of pages.
    for name in CHAPTERS:
        assert {f"_sources/{name}.ipynb", f"{name}.py", "#summary",
                "_static/favicon.svg"} <= links[f"{name}.html"]
    assert {f"{name}.html" for name in CHAPTERS} <= set.union(*links.values())


def test_nothing_is_there_that_no_reader_needs(book):
    sources = {path.name: path.read_text("utf-8") for path in book.glob("*.py")}
    assert sources == {f"{name}.py": (ROOT / f"notebooks/src/{name}.py").read_text("utf-8")
                       for name in CHAPTERS}
    pages = {f"{name}.html" for name in [*CHAPTERS, "index", "map", "search"]}
    assert {path.name for path in book.iterdir()} - set(sources) - pages == {
        ".buildinfo", "LICENSE.txt", "_downloads", "_images", "_sources", "_static", "objects.inv",
        "searchindex.js"}
    texts = [path for path in book.rglob("*") if path.is_file() and path.suffix not in (
        ".png", ".woff", ".woff2", ".ttf")]
    where = str(ROOT).encode()
    assert not [path for path in texts if where in path.read_bytes()], "paths of this machine"


def test_the_first_page_says_what_there_is(opened, book):
    page = opened("index.html")
    rows = page.locator("#chapters table tr").all()[1:]
    cells = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]
    listed = [row for row in cells if row[2]]
    assert [row[1][:2] for row in listed] == [name[:2] for name in CHAPTERS]
    for row, name in zip(listed, CHAPTERS, strict=True):
        chapter = (book / f"{name}.html").read_text("utf-8")
        assert f"<h1>{row[1][:2]} · {row[1][3:]}<" in chapter
        assert f"about {row[3]}utes" in re.sub(r"\s+", " ", chapter)
        assert row[4] == str(chapter.count("<summary>Answer"))
    short = [row for row in listed if row[0]]
    said = page.locator("p:has-text('short path')").inner_text()
    assert re.findall(r"\b\d\d\b", said.split(":")[0]) == [row[1][:2] for row in short]
    hours, minutes = re.search(r": (\d+) h(?: (\d+) min)? of reading", said).groups("0")
    assert 60 * int(hours) + int(minutes) == sum(int(row[3].split()[0]) for row in short)
    side = page.locator("nav.bd-links p.caption, nav.bd-links a").all_text_contents()
    assert side == [*(re.sub(r"^(\d\d) ", r"\1 · ", row[1]) for row in cells), "The map"]
    assert page.locator(".bd-footer-content").inner_text() == (
        "Licensed under the Apache License 2.0.")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for size in ({"width": 1300, "height": 1000}, TELEPHONE):
            page.set_viewport_size(size)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate("[...document.querySelectorAll('#chapters td')].every("
                                 "e => e.getBoundingClientRect().right <= innerWidth)")
            page.screenshot(path=PICTURES / f"book-index-{size['width']}-{scheme}.png")


def test_a_word_of_an_answer_is_found_and_quoted(opened):
    name = CHAPTERS[3]
    notebook = read(name)
    folded = "\n".join(cell.source for cell in answers(notebook))
    before = "\n".join(cell.source for cell in notebook.cells).replace(folded, "")
    names = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", folded)
    word = next(word for word in names if word not in before)
    page = opened("index.html")
    page.keyboard.press("Control+k")
    page.keyboard.type(f"{word}\n")
    found = page.locator(f"#search-results li:has(a[href^='{name}'])")
    found.locator("p.context").wait_for()
    assert word in found.locator("p.context").inner_text()
