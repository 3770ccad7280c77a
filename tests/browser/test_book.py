"""The book, page by page, as a reader without a network opens it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import matplotlib.image
import nbformat
import pytest
from bs4 import BeautifulSoup
from places import PICTURES, ROOT

CHAPTERS = sorted(path.stem for path in ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))
DEEPER = sorted(f"deeper/{path.stem}" for path in ROOT.glob("notebooks/deeper/[0-9][0-9]_*.ipynb"))
COURSE = tomllib.loads((ROOT / "notebooks/src/course.toml").read_text("utf-8"))
# In the order of the side bar, which is that of course.toml.
NOTEBOOKS = []
for part in COURSE["part"]:
    for chapter in part["chapter"]:
        NOTEBOOKS.append(chapter["file"])
        NOTEBOOKS += [f"deeper/{deeper['file']}" for deeper in chapter.get("deeper", [])]
assert sorted(NOTEBOOKS) == sorted([*CHAPTERS, *DEEPER])
TELEPHONE = {"width": 390, "height": 844}
# The address that course.toml doesn't have.
OTHER = "" if COURSE["repository"] else "https://github.com/someone/devices"

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


@pytest.fixture(scope="session")
def altered(book, tmp_path_factory):
    """The same book of a copy, published elsewhere, whose first chapter hides the word anteater."""
    folder = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    settings = folder / "notebooks/src/course.toml"
    rest = re.sub("^repository = .*\n", "", settings.read_text("utf-8"), flags=re.MULTILINE)
    settings.write_text(f'repository = "{OTHER}"\n{rest}', "utf-8")
    shutil.copytree(ROOT / "build/book-source", folder / "build/book-source")
    notebook = read(CHAPTERS[0])
    cell = next(cell for cell in notebook.cells
                if cell.get("outputs") and "fold" not in cell.metadata.get("tags", []))
    cell.metadata.tags = ["hide-output"]
    cell.outputs = [nbformat.v4.new_output("stream", text="anteater\n")]
    nbformat.write(notebook, folder / f"build/book-source/{CHAPTERS[0]}.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-c", folder / "notebooks/src/book",
         "-d", "build/book-source/.doctrees", "build/book-source", "build/book"],
        cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build/book"


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
    for number, cell in enumerate(notebook.cells):
        if cell.source.startswith("### Answer"):
            return notebook.cells[number:-1]
    return []   # a deeper notebook may have none


def labels(notebook):
    """What is to be read instead of folded code, in which `names` are code, and hidden outputs."""
    found = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "fold" in tags:
            found.append(cell.source.splitlines()[0].removeprefix("# ").replace("`", ""))
        if "hide-output" in tags and cell.outputs:
            found.append("What comes out")
    return found


def seen(page, selector):
    """The texts of those elements that a reader sees."""
    return page.locator(selector).evaluate_all(
        "all => all.filter(e => e.checkVisibility()).map(e => e.textContent.trim())")


@pytest.fixture(scope="session")
def pages(book):
    return {str(path.relative_to(book)): BeautifulSoup(path.read_text("utf-8"), "html.parser")
            for path in book.rglob("*.html") if path.parts[-2] != "_static"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_chapter_is_whole_and_asks_for_nothing_from_outside(opened, name):
    page = opened(f"{name}.html")
    notebook = read(name)
    page.wait_for_function("!document.querySelector('.math') || "
                           "document.querySelector('mjx-container')")
    assert page.locator("mjx-merror").count() == 0, "a formula that can't be read"
    assert page.title().startswith("Deeper · " if name in DEEPER else name[:2])
    assert page.locator("article.bd-article h1").count() == 1
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = page.locator("div.cell_input pre").evaluate_all("all => all.map(e => e.textContent)")
    assert [text.strip("\n") for text in shown] == [cell.source.strip("\n") for cell in code]
    texts = [output.metadata["image/png"]["alt"] for cell in code for output in cell.outputs
             if "image/png" in output.get("data", {})]
    assert not seen(page, "article details > :not(summary)"), "something is not folded"
    assert page.locator("details.folded > summary").all_text_contents() == labels(notebook)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.locator("article details").evaluate_all(
        "all => all.every(each => each.lastElementChild.checkVisibility())")
    shown = page.evaluate("[...document.querySelectorAll('.cell_output img')].filter("
                          "i => i.complete && i.naturalWidth > 300).map(i => i.alt)")
    assert shown == texts
    for size in (page.viewport_size, TELEPHONE):
        page.set_viewport_size(size)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"the page is {wide} pixels wider than the window"
        # On a telephone what a cell printed keeps its rows, and is scrolled.
        boxes = "div.cell_input pre" if size == TELEPHONE else "pre"
        cut = page.evaluate(f"[...document.querySelectorAll('article.bd-article {boxes}')].filter("
                            "e => e.scrollWidth > e.clientWidth).map(e => e.innerText)")
        assert not cut, "code or outputs of which the end is out of sight"
        assert page.evaluate("[...document.querySelectorAll('div.cell_output pre')].every("
                             "e => getComputedStyle(e).overflowX == 'auto' "
                             "|| e.scrollWidth <= e.clientWidth)"), "can't be scrolled"
        assert not page.evaluate(BADLY_WRAPPED), "lines that lose their indentation"
        assert len(seen(page, ".search-button__button, .bd-search")) == 1
        page.screenshot(path=PICTURES / f"book-{name.replace('/', '-')}-{size['width']}.png")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_page_has_the_parts_of_its_chapter_once(pages, name):
    page = pages[f"{name}.html"]
    cells = answers(read(name))
    folded = page.select("article details.answer")
    assert [each.summary.text for each in folded] == [
        cell.source.split("\n")[0].lstrip("# ").replace("*", "") for cell in cells
        if cell.source.startswith("### Answer")]
    code = [cell for cell in cells if cell.cell_type == "code"]
    for kind, number in (("input", len(code)), ("output", sum(bool(c.outputs) for c in code))):
        assert len(page.select(f"article details.answer div.cell_{kind}")) == number
        assert not page.select(f"article details.answer ~ div.cell div.cell_{kind}")
    headings = [each.text.rstrip("#") for each in page.select("article h2")]
    contents = [each.text for each in page.select("#pst-page-toc-nav a")]
    assert [each for each in contents if each in headings] == headings
    assert not [each for each in contents if each.startswith("Answer")]
    assert headings[-1] == ("Exercises" if cells else "Summary"), "its own links to neighbours"


def test_chapters_lead_to_chapters_and_a_deeper_notebook_back_to_its_own(pages):
    around = {name: [before, after] for before, name, after in zip(
        ["index", *CHAPTERS], CHAPTERS, [*CHAPTERS[1:], None])}
    for name in DEEPER:
        (chapter,) = [each for each in CHAPTERS if each[:2] == Path(name).name[:2]]
        following = around[chapter][1]
        around[name] = [f"../{chapter}", following and f"../{following}"]
    for name, links in around.items():
        found = pages[f"{name}.html"].select("a.left-prev, a.right-next")
        assert [link["href"] for link in found] == [f"{link}.html" for link in links if link]


def test_the_side_bar_folds_optional_notebooks_below_their_chapter(pages):
    titles = {name: pages[f"{name}.html"].h1.text.rstrip("#").removeprefix("Deeper · ")
              for name in NOTEBOOKS}
    chapter, deeper = next(pair for pair in pairwise(NOTEBOOKS) if pair[1] in DEEPER)
    for name, unfolded in (("index", []), (chapter, [chapter]), (deeper, [chapter])):
        side = pages[f"{name}.html"].select_one("nav.bd-links")
        assert [each.text.partition(". ")[2] for each in side.select("p.caption")] == [
            part["name"] for part in COURSE["part"]]
        rows = [each.text.replace("'", "’") for each in side.select("a")]
        assert rows == [title.replace("'", "’") for title in titles.values()]
        folded = side.select("li > details")
        assert sum(len(each.select("a")) for each in folded) == len(DEEPER)
        assert [each.parent.a.text for each in folded if each.has_attr("open")] == [
            titles[each] for each in unfolded]
        assert all(each.summary["aria-label"] for each in folded)


def test_a_folded_cell_is_a_quiet_line_that_opens(opened):
    name = next(name for name in NOTEBOOKS if labels(read(name)))
    page = opened(f"{name}.html")
    folded = page.locator("details.folded").first
    summary = folded.locator("summary")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for size in ({"width": 1440, "height": 900}, TELEPHONE):
            page.set_viewport_size(size)
            summary.scroll_into_view_if_needed()
            assert contrast(summary) > 4.5, "as the WCAG ask for text"
            box = summary.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"]
            page.screenshot(path=PICTURES / f"book-folded-{size['width']}-{scheme}.png")
    code = folded.locator("pre")
    assert not code.is_visible()
    summary.click()
    assert code.is_visible()
    page.screenshot(path=PICTURES / "book-folded-opened.png")
    summary.click()
    assert not code.is_visible()


def contrast(element):
    """How much lighter or darker the text is than what is behind it, by the WCAG's formula."""
    colours = element.evaluate("""element => {
        let behind = element
        while (/, 0\\)|transparent/.test(getComputedStyle(behind).backgroundColor))
            behind = behind.parentElement
        return [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor]
    }""")
    light = []
    for colour in colours:
        linear = []
        for number in re.findall(r"\d+", colour)[:3]:
            share = int(number) / 255
            linear.append(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)
        red, green, blue = linear
        light.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_code_can_be_read_in_the_light_and_in_the_dark(opened):
    page = opened(f"{CHAPTERS[3]}.html")
    words = page.locator("div.cell_input pre")
    kinds = set(words.locator("span[class]").evaluate_all("all => all.map(e => e.className)"))
    assert {"c1", "k", "nf", "mi"} <= kinds, "comments, keywords, names of functions, numbers"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for kind in kinds - {"line", "w"}:
            assert contrast(words.locator(f"span.{kind}").first) > 4.5, (scheme, kind)


def test_lines_are_as_long_as_one_likes_to_read(opened):
    """65 to 75 characters in a window that has room for them; and 100 columns of code fit in."""
    page = opened(f"{CHAPTERS[3]}.html")
    for width in (1440, 1300):
        page.set_viewport_size({"width": width, "height": 900})
        lines = page.evaluate("""() => {
            const counts = []
            for (const text of document.querySelectorAll('section > p')) {
                const style = getComputedStyle(text)
                const height = text.getBoundingClientRect().height
                const lines = Math.round(height / parseFloat(style.lineHeight))
                if (lines > 2) counts.push(text.innerText.length / (lines - 0.5))
            }
            return counts.sort((a, b) => a - b)
        }""")
        assert len(lines) > 5
        assert 65 <= lines[len(lines) // 2] <= 75
        rows = page.evaluate("""() => {
            const line = document.querySelector('div.cell_input .line')
            const [before, height] = [line.innerHTML, line.getBoundingClientRect().height]
            line.textContent = 'x'.repeat(100)
            const rows = line.getBoundingClientRect().height / height
            line.innerHTML = before
            return rows
        }""")
        assert rows == 1, "100 columns take two lines"
    size = page.evaluate("parseFloat(getComputedStyle(document.querySelector('pre')).fontSize)")
    assert size >= 12.5


@pytest.mark.parametrize("name, figure", [
    ("index", "img"), (CHAPTERS[0], "img[src$='.svg']"), (CHAPTERS[7], "div.cell_output img")])
def test_a_figure_does_not_glare_in_the_dark(opened, name, figure):
    page = opened(f"{name}.html")
    page.emulate_media(color_scheme="dark")
    page.locator(f"article {figure}").first.screenshot(path=PICTURES / "book-figure-dark.png")
    pixels = matplotlib.image.imread(PICTURES / "book-figure-dark.png")[:, :, :3].mean(axis=2)
    height, width = pixels.shape
    ground = pixels[height // 2, 3]
    assert 0.88 < ground < 0.92
    assert pixels[4:-4, 4:-4].max() < ground + 0.02, "a card around something brighter"
    assert pixels[4:-4, width // 4:-width // 4].min() < 0.1, "what is black stays black"
    assert page.locator(f"article {figure}").first.evaluate(
        "e => parseFloat(getComputedStyle(e).borderRadius)") > 8


def test_a_cell_is_copied_as_it_is_written(opened):
    name = CHAPTERS[3]
    code = [cell for cell in read(name).cells if cell.cell_type == "code"]
    number = next(i for i, cell in enumerate(code) if "    " in cell.source
                  and "fold" not in cell.metadata.get("tags", []))
    page = opened(f"{name}.html")
    buttons = page.locator("div.cell_input button.copybtn")
    buttons.first.wait_for(state="attached")
    assert buttons.count() == len(code)
    assert page.locator("div.cell_output button.copybtn").count() == 0
    button = buttons.nth(number)
    button.locator("xpath=..").hover()
    page.wait_for_function("button => getComputedStyle(button).opacity == 1",
                           arg=button.element_handle())
    button.click()
    page.evaluate("document.querySelector('article').append(document.createElement('textarea'))")
    page.locator("article textarea").focus()
    page.keyboard.press("Control+v")
    assert page.locator("article textarea").input_value().strip() == code[number].source.strip()


def test_where_nothing_hovers_the_button_that_copies_is_there(chromium, book):
    context = chromium.new_context(viewport=TELEPHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"{book.as_uri()}/{CHAPTERS[3]}.html")
    button = page.locator("div.cell_input button.copybtn").locator("visible=true").first
    button.wait_for()
    assert button.evaluate("e => getComputedStyle(e).opacity") == "1"
    line = page.locator("div.cell_input .line").locator("visible=true").first
    low = button.bounding_box()["y"] + button.bounding_box()["height"]
    assert low <= line.bounding_box()["y"] + 1, "it covers code"
    context.close()


def test_the_book_leads_to_the_repository_if_there_is_one(book, altered):
    for folder, address in ((book, COURSE["repository"]), (altered, OTHER)):
        for name in ("index", CHAPTERS[0], DEEPER[0]):
            text = (folder / f"{name}.html").read_text("utf-8")
            links = [link["href"].split("?")[0] for link in
                     BeautifulSoup(text, "html.parser").select("[class*='btn-source-']")]
            expected = []
            if address:
                expected = [address, f"{address}/issues/new"]
                if name in NOTEBOOKS:
                    expected.insert(1, f"{address}/edit/main/notebooks/src/{name}.py")
            assert links == expected, name
            if name == "index":
                assert (f'href="{address}">its repository</a>' in text) == bool(address)


def test_a_hidden_output_waits_below_its_code_and_is_not_found(page, altered):
    page.goto(f"{altered.as_uri()}/{CHAPTERS[0]}.html")
    output = page.locator("div.cell_output", has_text="anteater")
    summary = page.locator("details.folded", has=output).locator("summary")
    assert summary.inner_text() == "What comes out"
    assert page.locator("div.cell_input:visible + details", has=output).count() == 1
    assert not output.is_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert contrast(summary) > 4.5
        summary.focus()
        page.keyboard.press("Enter")
        assert output.is_visible()
        page.screenshot(path=PICTURES / f"book-hidden-output-{scheme}.png")
        page.keyboard.press("Enter")
    page.emulate_media(media="print")
    assert output.is_visible()
    assert "anteat" not in (altered / "searchindex.js").read_text("utf-8")


def test_make_book_names_what_the_reader_has_changed(tmp_path):
    """In a copy, with a git repository and without one, where nothing is set up or built."""
    for name in ("Makefile", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for name in ("requirements/setup.sh", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)

    def said():
        done = subprocess.run(["make", "book"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0
        return done.stderr

    assert said() == ""
    for command in (["init", "-q"], ["add", "notebooks"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert said() == ""
    ran = f"notebooks/{DEEPER[0]}.ipynb"
    (tmp_path / ran).write_text("what she has run")
    assert said() == (f"build/book shows your own version of {ran} "
                      f"(for the course's: git restore {ran})\n")


def test_answers_are_printed_and_a_link_into_one_opens_it(opened):
    page = opened(f"{CHAPTERS[0]}.html")
    inside = page.locator("article details.answer > div")
    showing = "all => all.map(each => each.checkVisibility())"
    assert not any(inside.evaluate_all(showing))
    page.emulate_media(media="print")
    assert all(inside.evaluate_all(showing))
    page.emulate_media(media="screen")
    page = opened(f"{CHAPTERS[0]}.html#answer-2")
    page.wait_for_function("document.querySelector('details[open]')")
    assert inside.evaluate_all(showing) == [False, False, True]  # Your turn, answers 1 and 2


def test_no_link_is_dead(pages, book):
    links = {name: {each.get("href") or each.get("src") for each in page.select("[href], [src]")}
             for name, page in pages.items()}
    names = {name: {each["id"] for each in page.select("[id]")} for name, page in pages.items()}
    dead = []
    for name in pages:
        for link in links[name]:
            file, _, part = unquote(link).partition("#")
            file = file.split("?")[0]
            if file.startswith(("http:", "https:")):
                continue
            path = (book / name).parent / file if file else book / name
            page = os.path.relpath(path, book)
            if not path.exists() or (part and part not in names[page]):
                dead.append((name, link))
    assert not dead
    # It was looked at, too: notebooks to download, their sources, other chapters, parts of pages.
    for name in NOTEBOOKS:
        up = "../" if name in DEEPER else ""
        assert {f"{up}_sources/{name}.ipynb", f"{Path(name).name}.py", "#summary",
                f"{up}_static/favicon.svg", f"{up}LICENSE.txt"} <= links[f"{name}.html"]
    assert {f"{name}.html" for name in NOTEBOOKS} <= set.union(*links.values())


def test_nothing_is_there_that_no_reader_needs(book):
    beside = [*book.iterdir(), *book.glob("deeper/*")]
    found = {str(path.relative_to(book)): path for path in beside}
    sources = {name: path.read_text("utf-8") for name, path in found.items()
               if path.suffix == ".py"}
    assert sources == {f"{name}.py": (ROOT / f"notebooks/src/{name}.py").read_text("utf-8")
                       for name in NOTEBOOKS}
    pages = {f"{name}.html" for name in [*NOTEBOOKS, "index", "search"]}
    leads = re.compile('http-equiv="refresh" content="3; url=([^"]+)"')
    moved = {name: leads.search(path.read_text("utf-8")) for name, path in found.items()
             if path.suffix == ".html"}
    moved = {name: address[1] for name, address in moved.items() if address}
    assert moved["map.html"] == "deeper/20_seven_ways_computed.html"
    for name, address in moved.items():
        assert (book / name).parent.joinpath(address).is_file(), f"{name} leads to {address}"
    assert set(found) - set(sources) - pages - set(moved) - {"deeper"} == {
        ".buildinfo", "LICENSE.txt", "_downloads", "_images", "_sources", "_static", "objects.inv",
        "searchindex.js"}
    texts = [path for path in book.rglob("*") if path.is_file() and path.suffix not in (
        ".png", ".woff", ".woff2", ".ttf")]
    where = str(ROOT).encode()
    assert not [path for path in texts if where in path.read_bytes()], "paths of this machine"


def test_the_first_page_says_what_there_is(opened, book):
    page = opened("index.html")
    assert page.locator("article h2").all_text_contents()[0].startswith("For whom")
    (picture,) = page.locator("article img").evaluate_all(
        "all => all.map(e => [e.naturalWidth, e.alt, e.getBoundingClientRect().bottom])")
    assert picture[0] > 600 and "two devices" in picture[1]
    assert picture[2] < 1000, "the picture is below what one sees first"
    for part in page.locator("#chapters summary").all():    # its optional notebooks
        part.click()
    rows = page.locator("#chapters tbody tr").all()
    names = [row.locator("a").get_attribute("href").removesuffix(".html") for row in rows]
    assert sorted(names) == sorted(NOTEBOOKS)
    assert [name for name in names if name in CHAPTERS] == CHAPTERS
    listed = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]
    for row, name in zip(listed, names, strict=True):
        chapter = (book / f"{name}.html").read_text("utf-8")
        title = re.sub(r"^(\d\d) ", r"\1 · ", row[1])
        if name in DEEPER:
            assert not row[0]
            title = re.sub(r"^\d\d ", "Deeper · ", row[1])
        assert f"<h1>{title}<" in chapter
        assert f"about {row[3]}utes" in re.sub(r"\s+", " ", chapter)
        assert row[4] == str(len(re.findall(r"<summary>Answer \d", chapter)))
    short = [row for row in listed if row[0]]
    said = page.locator("p:has-text('short path')").inner_text()
    assert re.findall(r"\b\d\d\b", said.split(":")[0]) == [row[1][:2] for row in short]
    deeper = [row for row, name in zip(listed, names, strict=True) if name in DEEPER]
    chapters = [row for row in listed if row not in deeper]
    for before, rows in ((": ", short), ("chapters take ", chapters), ("deeper, ", deeper)):
        found = re.search(rf"{before}(?=\d)(?:(\d+) h ?)?(?:(\d+) min)?\b", said)
        hours, minutes = found.groups("0")
        assert 60 * int(hours) + int(minutes) == sum(int(row[3].split()[0]) for row in rows)
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


def test_search_finds_and_quotes_an_answer_but_nothing_of_folded_code(opened):
    name = CHAPTERS[3]
    folded, answered, rest = "", "", ""
    for each in NOTEBOOKS:
        notebook = read(each)
        for cell in notebook.cells:
            rest += f"{cell.get('outputs')}\n"
            if "fold" in cell.metadata.get("tags", []):
                folded += f"{cell.source}\n"
            elif each == name and cell in answers(notebook):
                answered += f"{cell.source}\n"
            else:
                rest += f"{cell.source}\n"

    def only(here, other):
        """A word of which the other texts haven't as much as its stem."""
        names = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", here)
        return next(word for word in names if word[:-3] not in other + rest)

    page = opened("index.html")
    page.keyboard.press("Control+k")
    word = only(answered, folded)
    page.keyboard.type(f"{word}\n")
    found = page.locator(f"#search-results li:has(a[href^='{name}'])")
    found.locator("p.context").wait_for()
    assert word in found.locator("p.context").inner_text()
    page = opened(f"search.html?q={only(folded, answered)}")
    page.locator("#search-results", has_text="did not match any documents").wait_for()


def test_search_quotes_formulas_in_characters_and_text_from_where_it_is_said(opened):
    name = next(name for name in NOTEBOOKS if r"\frac" in "".join(
        cell.source for cell in read(name).cells if cell.cell_type == "markdown"))
    page = opened(f"search.html?q={name.split('_')[-1]}")
    page.locator("#search-results p.context").first.wait_for()
    quoted = page.evaluate("name => Search.htmlToText(PAGES[name], null)", f"{name}.html")
    assert "What you’ll do" in quoted and not quoted.count("Contents")
    formulas = page.evaluate("""() => Object.values(PAGES).flatMap(text => [...new DOMParser()
        .parseFromString(text, 'text/html').querySelectorAll('.math')].map(e => e.textContent))""")
    assert len(formulas) > 100
    shown = page.evaluate("all => all.map(each => inCharacters(each))", formulas)
    left = [each for each in shown if re.search(r"[\\{}]|frac|quad", each)]
    assert not left, "TeX that search.html can't tell"
    shown = page.evaluate(r"""Search.htmlToText(`<article class="bd-article">so <span class="math">
        \\(w \\leftarrow \\frac{w + \\sqrt{k}}{T_\\text{both}}\\)</span></article>`, null)""")
    assert shown == "so w ← (w + √k)/T_both"
