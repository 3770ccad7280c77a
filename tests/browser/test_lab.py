"""JupyterLab as a person uses it: `make lab`, then clicks; on digits, in a copy of the course.

The page tells what is seen, the notebook that JupyterLab saves tells what was run.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from marking import assignment, gradebook
from places import PICTURES, ROOT

MINUTE = 60_000     # ms, as Playwright counts
IDLE = '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
# How many cells have been started and not run. A folded cell has no [*] that could be seen.
WAITING = """() => jupyterapp.shell.currentWidget.content.widgets.filter(
    cell => cell.model.type == "code" && cell.model.executionState == "running").length"""
COPY = ROOT / "build/lab"
CHAPTERS = {path.stem[:2]: path.name
            for path in sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))}
DEEPER = [f"deeper/{path.name}" for path in sorted(ROOT.glob("notebooks/deeper/*.ipynb"))]
FOLDING = [name for name in DEEPER
           if '"fold"' in (ROOT / "notebooks" / name).read_text("utf-8")]  # has folded cells
# JupyterLab takes all rounds: each of these runs there only when all rounds are wanted.
RUN_HERE = FOLDING if os.environ.get("COURSE_ROUNDS") == "all" else FOLDING[::6]
PLACEHOLDER = ".jp-InputPlaceholder .jp-PlaceholderText"    # instead of the code of a folded cell
CORNER = {"x": 3, "y": 3}
FOLDED = "jp-MarkdownHeadingCollapsed"
# A reader's own settings. All cells are on the page, also those that are out of sight, so that they
# can be looked at.
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"}}


@contextmanager
def running(command, cwd, folder, settings=SETTINGS):
    """JupyterLab's address, with its token; at the end it and all its kernels are ended.

    What it says in its terminal is in `folder`/log.
    """
    for name, values in settings.items():
        file = folder / f"config/lab/user-settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    environment = {**os.environ, "COURSE_OFFLINE": "1", "JUPYTER_CONFIG_DIR": f"{folder}/config",
                   "JUPYTER_DATA_DIR": f"{folder}/data"}
    environment.pop("COURSE_DATA", None)
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=stream, stderr=stream,
                                   start_new_session=True)
    try:
        end = time.monotonic() + 180
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/lab\S*token=\w+", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield found[0]
    finally:
        os.killpg(process.pid, signal.SIGTERM)   # the server ends its kernels
        process.wait(60)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the settings of the reader who types `make lab` are, and what the terminal shows."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def lab(chromium, tmp_path_factory, folder):
    """`make lab`'s address. It shows a copy of the course, in build/lab."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns("build", "__pycache__", ".*"))
    made = tmp_path_factory.mktemp("assignments")
    gradebook.release(made, ["ps1"])
    shutil.copytree(made / "release/ps1", COPY / "ps1")
    arguments = ("--no-browser --port=0 --LabApp.expose_app_in_browser=True "
                 f"--ServerApp.root_dir={COPY.relative_to(ROOT)}")
    with running(["make", "lab", f"ARGS={arguments}"], ROOT, folder) as address:
        yield address


@pytest.fixture
def opened(page, lab):
    """Opens a notebook, given its path from the course's root; all kernels are ended after."""
    yield lambda path: Notebook(page, lab, path)
    end_kernels(page, lab)


def end_kernels(page, lab):
    api, token = lab.split("/lab")[0] + "/api/sessions", {"token": lab.split("token=")[1]}
    for session in page.request.get(api, params=token).json():
        page.request.delete(f"{api}/{session['id']}", params=token)


class Notebook:
    """One notebook, open in JupyterLab."""

    def __init__(self, page, lab, path):
        """`path`: from the course's root."""
        self.page, self.path = page, COPY / path
        page.goto(re.sub(r"/lab\S*\?", f"/lab/tree/{path}?reset&", lab))
        page.wait_for_selector('.jp-StatusBar-TextItem:has-text("| Idle")', timeout=MINUTE)
        self.wait()

    def wait(self, minutes=10):
        """Until the kernel has nothing to do."""
        until(self.page, self.idle, 60 * minutes)

    def idle(self):    # between two cells and before it hears of the first, the kernel is idle, too
        return self.page.locator(IDLE).count() and not self.page.evaluate(WAITING)

    def choose(self, menu, command):
        self.page.click(f'.lm-MenuBar-itemLabel:text-is("{menu}")')
        self.page.click(f'li[data-command="{command}"]')

    def start(self, command="runmenu:run-all"):
        before = self.prompts()

        def started():    # each prompt becomes [*], or at once [1]
            return self.prompts() != before

        for _ in range(3):    # a busy machine's page may not listen yet: a person clicks again
            self.choose("Run", command)
            try:
                return until(self.page, started, 15)
            except AssertionError:
                continue
        raise AssertionError(f"{command}: nothing happens")

    def prompts(self):
        return self.page.locator(".jp-InputPrompt").all_inner_texts()

    def save(self):
        """Save it, and read what was saved."""
        with self.page.expect_response(lambda answer: answer.request.method == "PUT"
                                       and "/api/contents/" in answer.url):
            self.page.keyboard.press("Control+s")
        self.page.wait_for_selector(".lm-DockPanel-tabBar .jp-mod-current:not(.jp-mod-dirty)")
        return nbformat.read(self.path, 4)

    def texts(self):
        """What the outputs on the page say."""
        return "\n".join(self.page.locator(".jp-OutputArea-output").all_inner_texts())

    def picture(self, name):
        """Keep a picture of the whole notebook as build/screenshots/`name`.png."""
        size, panel = self.page.viewport_size, self.page.locator(".jp-WindowedPanel-outer")
        height = panel.evaluate("panel => panel.scrollHeight") + 120   # menus and the like
        self.page.set_viewport_size({**size, "height": min(height, 16_000)})   # Chromium's limit
        panel.evaluate("panel => panel.scrollTo(0, 0)")
        self.page.wait_for_timeout(1000)
        self.page.screenshot(path=PICTURES / f"{name}.png")
        self.page.set_viewport_size(size)


def until(page, holds, seconds=60):
    """Looks again and again, while the page goes on."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        page.wait_for_timeout(50)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def errors(notebook):
    return [(cell.execution_count, output.ename) for cell in code(notebook)
            for output in cell.outputs if output.output_type == "error"]


def pictures(notebook):
    return sum("image/png" in output.get("data", {}) for cell in code(notebook)
               for output in cell.outputs)


def without_outputs(notebook):
    notebook = nbformat.from_dict(notebook)
    for cell in code(notebook):
        cell.outputs = []
    return notebook


def assert_whole(notebook, seen):
    """Everything ran once, in order, without an error or a warning, and is to be seen."""
    cells = code(notebook)
    assert not errors(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o.text for cell in cells for o in cell.outputs if o.get("name") == "stderr"]
    assert_seen(notebook, seen)


def assert_seen(notebook, seen):
    """Every picture is drawn, nothing is too wide, and what is folded is out of sight."""
    drawn = seen.locator(".jp-OutputArea-output img").evaluate_all(
        "all => all.filter(image => image.complete && image.naturalWidth > 300).length")
    # A hidden output isn't drawn until its cell is run, and hidden in the file all the same.
    open_cells = [cell for cell in code(notebook)
                  if not cell.metadata.get("jupyter", {}).get("outputs_hidden")]
    at_least = pictures(nbformat.v4.new_notebook(cells=open_cells))
    assert at_least <= drawn <= pictures(notebook)
    too_wide = seen.locator(".jp-OutputArea-output, .jp-MarkdownOutput").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)")
    assert not too_wide
    shown = seen.locator(".jp-Notebook-cell").evaluate_all(
        "all => all.map(e => e.offsetHeight > 0)")
    assert shown == unfolded(notebook.cells)


def unfolded(cells):
    """For each cell, whether it is in sight: a folded heading takes with it what is below it."""
    seen, folded = [], 7
    for cell in cells:
        prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
        marks = re.findall(r"^(#{1,6}) ", prose, re.MULTILINE)
        level = min(map(len, marks)) if marks and cell.cell_type == "markdown" else 7
        if level <= folded:
            folded = 7
        seen.append(folded == 7)
        if seen[-1] and cell.metadata.get(FOLDED):
            folded = level
    return seen


def folded(notebook):
    """The number of each folded cell, with the label that is seen of it."""
    return {number: cell.source.splitlines()[0] for number, cell in enumerate(notebook.cells)
            if "fold" in cell.metadata.get("tags", [])}


def neighbours(name):
    """By arrow, text and target of the links in a chapter's last cell."""
    notebook = nbformat.read(ROOT / "notebooks" / name, 4)
    links = re.findall(r"\[([^]]*)\]\(([^)\s]+)\)", notebook.cells[-1].source)
    return {text[0 if text.startswith("←") else -1]: (text, target) for text, target in links}


def tabs(page):
    return page.locator(".lm-DockPanel-tabBar .lm-TabBar-tabLabel").all_inner_texts()


def close(page, name):
    """Close the tab, as a person who is not asked whether to save."""
    page.click(f'.lm-DockPanel-tabBar .lm-TabBar-tab:has-text("{name}") .lm-TabBar-tabCloseIcon')
    until(page, lambda: name not in tabs(page), 10)


def complaints(terminal):
    """The lines that should worry a reader."""
    return [line for line in terminal.splitlines()
            if re.search(r"^\[[WE] |\b(WARNING|ERROR)\b|Traceback", line)]


def title(page, name):
    """The first line of the file `name`, once the tab that was just opened shows it."""
    page.wait_for_selector(f'.lm-DockPanel-tabBar .jp-mod-current:has-text("{name}")')
    if name.endswith(".ipynb"):
        page.wait_for_selector('.jp-Toolbar-kernelName:visible:has-text("Python 3")')
        page.wait_for_selector(f"{IDLE}:visible", timeout=MINUTE)
        title = page.locator(".jp-Notebook:visible h1").inner_text()
        assert title.startswith((name[:2], "Deeper · "))
        return title
    if name.endswith(".md"):
        return page.locator(".jp-MarkdownViewer:visible h1").inner_text()
    return page.locator(".jp-FileEditor:visible .cm-line").first.inner_text()


@pytest.fixture
def start(page, lab, folder):
    """The first page, as `make lab` opens it."""
    page.asked_for = []
    page.on("request", lambda request: page.asked_for.append(request.url))
    page.goto(f"{lab}&reset")    # without the tabs of an earlier test
    page.wait_for_selector(".jp-MarkdownViewer h1")
    page.screenshot(path=PICTURES / "lab-start.png")
    yield page
    end_kernels(page, lab)


def test_the_first_page_is_start_md_beside_what_there_is_to_read(start, folder):
    assert tabs(start) == ["start.md"]
    assert start.url.split("?")[0].endswith("/lab/tree/notebooks/start.md")
    assert start.locator(".jp-DirListing-itemText").all_inner_texts() == [
        "assignments", "deeper", *CHAPTERS.values(), "ddp_train.py", "first_ddp.py",
        "lenet_contestant.py", "pipeline.py", "ranks.py", "resumable_train.py", "running.md",
        "sharded_train.py", "start.md", "tensor_parallel.py", "train_lenet.py",
        "train_transformer.py", "transformer.py"]
    assert "Nbgrader" not in start.locator(".lm-MenuBar-itemLabel").all_inner_texts()
    assert not complaints((folder / "log").read_text())


def test_each_link_of_the_first_page_opens_what_it_names(start, lab):
    for part in start.locator(".jp-MarkdownViewer summary").all():    # optional notebooks
        part.click()
    found = start.locator(".jp-MarkdownViewer a:not(.jp-InternalAnchorLink)")
    anchors = found.evaluate_all("all => all.map(a => [a.innerText, a.href])")
    inside, opened = start.url.split("/lab/")[0] + "/files/", {}
    for number, (text, target) in enumerate(anchors):
        if not target.startswith(inside):    # outside; JupyterLab doesn't follow "#section"
            assert re.match(r"https://[\w.-]+/", target), target
            continue
        path = Path(target.removeprefix(inside).split("?")[0])
        if path not in opened:
            found.nth(number).click()
            opened[path] = title(start, path.name)
            if path.suffix == ".ipynb":
                assert_seen(nbformat.read(COPY / path, 4), start)
            close(start, path.name)
            end_kernels(start, lab)
        if path.suffix == ".ipynb":      # named by its number or by a word of its title
            names = re.findall(r"\d\d|\w{4,}", text.lower())
            assert any(name in opened[path].lower() for name in names), (text, opened[path])
    assert {str(path.relative_to("notebooks")) for path in opened if path.suffix == ".ipynb"} >= {
        *CHAPTERS.values(), *DEEPER}
    assert len(start.context.pages) == 1, "a page opened in the browser, not in JupyterLab"
    # By now it would have asked.
    assert start.locator(".Toastify__toast").count() == 0
    assert not [url for url in start.asked_for if re.search("/lab/api/(news|update)", url)
                or not url.startswith((start.url.split("/lab/")[0], "data:", "blob:"))]


def test_each_chapter_leads_to_the_next(start):
    for name, following in pairwise([*CHAPTERS.values(), None]):
        arrows = neighbours(name)
        assert arrows.get("→", (None, None))[1] == following
        if following:
            assert neighbours(following)["←"][1] == name
    first, second, *_ = CHAPTERS.values()
    at = "start.md"
    for place, link, opens in [
            (".jp-MarkdownViewer", f'a[href*="/{first}"]', first),
            (".jp-Notebook-cell >> nth=-1", f'a:text-is("{neighbours(first)["→"][0]}")', second),
            (".jp-Notebook-cell >> nth=0", f'a:text-is("{neighbours(second)["←"][0]}")', first),
            (".jp-Notebook-cell >> nth=0", 'a:text-is("Start")', "start.md")]:
        start.click(f"{place} >> {link} >> nth=0")
        title(start, opens)
        close(start, at)
        at = opens


def test_what_one_has_run_is_marked_on_the_first_page_and_nowhere_else(page, opened, lab):
    start = COPY / "notebooks/start.md"
    before = start.read_bytes()
    (COPY / "build/run-in-lab.json").unlink(missing_ok=True)
    book = opened(f"notebooks/{CHAPTERS['02']}")
    page.locator(".jp-Notebook-cell.jp-CodeCell").first.click(position=CORNER)
    page.keyboard.press("Shift+Enter")
    book.wait()
    assert "execution" not in json.dumps([c.metadata for c in book.save().cells])
    assert with_a_mark(page, lab) == []
    for name in (CHAPTERS["02"], DEEPER[0]):
        book = opened(f"notebooks/{name}")
        book.start()
        book.wait()
        assert "execution" not in json.dumps([c.metadata for c in book.save().cells])
    assert with_a_mark(page, lab) == [CHAPTERS["02"], Path(DEEPER[0]).name]
    assert start.read_bytes() == before


def with_a_mark(page, lab):
    """The notebooks that have a mark on the first page."""
    page.goto(f"{lab}&reset")
    page.wait_for_selector(".jp-MarkdownViewer h1")
    rows = page.locator(".jp-MarkdownViewer tr", has_text="✓")
    links = rows.locator("a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    return [Path(link.partition("?")[0]).name for link in links]


@pytest.mark.parametrize("name", [CHAPTERS["04"], CHAPTERS["16"]])
def test_no_code_is_cut_on_a_narrow_screen(page, opened, name):
    page.set_viewport_size({"width": 1024, "height": 800})
    opened(f"notebooks/{name}")
    beside = page.locator("#jp-left-stack").bounding_box()
    assert 100 < beside["width"] < 200, "the list of files takes the chapter's room, or has none"
    cut = page.locator(".jp-Notebook .cm-scroller").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)")
    assert page.locator(".jp-Notebook .cm-line").count() > 100 and not cut


@pytest.mark.parametrize("name", [CHAPTERS[number] for number in ("01", "05", "08", "12")])
def test_a_picture_or_code_is_on_the_first_screen(page, opened, name):
    page.set_viewport_size({"width": 1440, "height": 900})
    opened(f"notebooks/{name}")
    tops = page.locator(".jp-Notebook img, .jp-Notebook .cm-line").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().top)")
    assert min(tops) < 850


@pytest.mark.parametrize("version", [None, "3.11.0"])
def test_a_chapter_that_is_read_stays_as_it_was(page, opened, version):
    """Also where it was made with another Python than the reader's."""
    path = COPY / "notebooks" / CHAPTERS["02"]
    notebook = nbformat.read(path, 4)
    if version:
        notebook.metadata.language_info = {"name": "python", "version": version}
        nbformat.write(notebook, path)
    before = path.read_bytes()
    book = opened(f"notebooks/{CHAPTERS['02']}")
    assert page.locator(".jp-mod-dirty").count() == 0
    folded = page.locator(".jp-showHiddenCellsButton")
    assert folded.count() == sum(FOLDED in cell.metadata for cell in notebook.cells) > 0
    while folded.count():
        folded.first.click()
    page.locator(".jp-Notebook h2").first.click()
    page.keyboard.press("ArrowLeft")    # folds the section
    folded.wait_for()
    page.wait_for_selector(".lm-DockPanel-tabBar .jp-mod-dirty")
    book.save()
    assert path.read_bytes() == before
    close(page, path.name)


@pytest.mark.parametrize("name", FOLDING)
def test_cells_that_check_or_draw_open_by_a_click_and_leave_no_trace(page, opened, name):
    path = COPY / "notebooks" / name
    before = path.read_bytes()
    cells = folded(nbformat.read(path, 4))
    book = opened(f"notebooks/{name}")
    assert page.locator(PLACEHOLDER).all_inner_texts() == list(cells.values()) != []
    for width in (1440, 1024):
        page.set_viewport_size({"width": width, "height": 900})
        page.locator(PLACEHOLDER).first.scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        assert page.locator(".jp-WindowedPanel-outer").evaluate(
            "panel => panel.scrollWidth <= panel.clientWidth"), "a label moves the notebook"
        assert page.locator(PLACEHOLDER).evaluate_all(
            "all => all.every(each => each.scrollWidth <= each.clientWidth)"), "a label is cut"
        page.screenshot(path=PICTURES / f"lab-folded-{Path(name).stem}-{width}.png")
    for number, label in cells.items():
        cell = page.locator(".jp-Notebook-cell").nth(number)
        code = cell.locator(".cm-content")
        assert not code.is_visible()
        cell.locator(PLACEHOLDER).click()
        code.wait_for()
        assert code.inner_text().startswith(label)
    page.screenshot(path=PICTURES / f"lab-folded-{Path(name).stem}-opened.png")
    assert page.locator(PLACEHOLDER).count() == 0
    page.wait_for_selector(".lm-DockPanel-tabBar .jp-mod-dirty")
    book.save()
    assert path.read_bytes() == before
    close(page, path.name)


@pytest.mark.parametrize("name", RUN_HERE)
def test_cells_that_check_or_draw_stay_folded_when_they_run(page, opened, name):
    committed = nbformat.read(ROOT / "notebooks" / name, 4)
    cells = folded(committed)
    book = opened(f"notebooks/{name}")
    book.choose("Edit", "editmenu:clear-all")
    book.start()
    book.wait()
    assert page.locator(PLACEHOLDER).all_inner_texts() == list(cells.values())
    saved = book.save()
    assert not errors(saved)
    assert [cell.metadata for cell in saved.cells] == [cell.metadata for cell in committed.cells]
    assert_seen(saved, page)
    book.picture(f"lab-{Path(name).stem}")
    # And one alone, as by a reader who goes from cell to cell.
    number = list(cells)[-1]
    page.locator(".jp-Notebook-cell").nth(number).click(position=CORNER)
    page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".lm-DockPanel-tabBar .jp-mod-dirty")
    book.wait()
    assert page.locator(PLACEHOLDER).all_inner_texts() == list(cells.values())
    assert book.save().cells[number].execution_count == len(code(committed)) + 1


def test_a_prediction_hides_its_answer_until_its_cell_is_run(page, opened):
    path = COPY / "notebooks" / CHAPTERS["03"]
    before = path.read_bytes()
    cells = nbformat.read(path, 4).cells
    asked = [number for number, cell in enumerate(cells)
             if "predict" in cell.metadata.get("tags", [])]
    answer = cells[asked[0]].outputs[0].text.strip()
    book = opened(f"notebooks/{path.name}")
    cell = page.locator(".jp-Notebook-cell").nth(asked[0])
    hidden = page.locator(".jp-OutputPlaceholder")
    assert hidden.count() == len(asked) > 0
    assert page.locator(".jp-mod-dirty").count() == 0

    cell.click(position=CORNER)
    page.screenshot(path=PICTURES / "lab-03-predict.png")
    assert answer not in cell.inner_text()
    book.choose("Run", "notebook:run-all-above")
    book.wait()
    assert answer not in cell.inner_text()
    page.keyboard.press("Shift+Enter")
    until(page, lambda: answer in cell.inner_text())
    assert hidden.count() == len(asked) - 1
    saved = book.save()
    assert [cell.metadata for cell in saved.cells] == [cell.metadata for cell in cells]

    opened(f"notebooks/{path.name}")    # as it was saved: the answer is hidden again
    assert hidden.count() == len(asked)
    path.write_bytes(before)


def test_a_chapter_runs_from_top_to_bottom(page, opened, folder):
    # A kernel that another test ended while it started may have said so ("KeyboardInterrupt").
    said = len((folder / "log").read_text())
    book = opened(f"notebooks/{CHAPTERS['01']}")
    book.choose("Edit", "editmenu:clear-all")
    book.start()
    book.wait()
    saved = book.save()
    book.picture("lab-01")
    assert_whole(saved, page)
    committed = nbformat.read(ROOT / f"notebooks/{CHAPTERS['01']}", 4)
    assert pictures(saved) == pictures(committed) > 0
    assert without_outputs(saved) == without_outputs(committed)
    assert not complaints((folder / "log").read_text()[said:])


def test_training_is_interrupted_and_begun_again(page, opened):
    # An epoch of the digits is over sooner than a page is looked at: the first time there are more.
    notebook = nbformat.read(COPY / "notebooks" / CHAPTERS["08"], 4)
    (cell,) = [cell for cell in code(notebook) if 'two, title="narrow")' in cell.source]
    cell.source = "begun = globals().get('begun', 0) + 1\n" + cell.source.replace(
        "title=", "epochs=1000 if begun == 1 else 1, title=")
    nbformat.write(notebook, COPY / "notebooks/08_interrupted.ipynb")
    book = opened("notebooks/08_interrupted.ipynb")
    book.choose("Edit", "editmenu:clear-all")
    book.start()
    bar = page.locator(".jp-OutputArea-output", has_text=re.compile(r"\d+%\|"))
    bar.wait_for(timeout=5 * MINUTE)
    shares = set()
    until(page, lambda: shares.update(re.findall(r"(\d+)%\|", book.texts())) or len(shares) > 2)
    bar.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / "lab-08-training.png")
    book.choose("Kernel", "kernelmenu:interrupt")
    book.wait(1)
    saved = book.save()
    ((number, error),) = errors(saved)
    assert error == "KeyboardInterrupt"
    assert "fit(" in code(saved)[number - 1].source
    assert [cell.execution_count for cell in code(saved)[number:]] == [None] * (
        len(code(saved)) - number)

    cell = page.locator(".jp-CodeCell").nth(number - 1)
    cell.scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / "lab-08-interrupted.png")
    cell.locator(".jp-InputPrompt").click()
    book.start("notebook:run-all-below")
    book.wait()
    saved = book.save()
    for place, cell in enumerate(code(saved)):    # one was begun twice
        cell.execution_count -= place >= number - 1
    assert_whole(saved, page)
    until(page, lambda: not re.search(r"\d+%\|", book.texts()))  # no bar stays


def test_the_table_of_contents_shows_the_chapters_sections(page, opened):
    book = opened(f"notebooks/{CHAPTERS['03']}")
    page.click('.lm-TabBar-tab[data-id="table-of-contents"]')
    prose = [cell.source for cell in nbformat.read(book.path, 4).cells
             if cell.cell_type == "markdown"]
    headings = re.findall(r"^#+ (.+)$", "\n".join(prose), re.MULTILINE)
    page.wait_for_function(
        f"document.querySelectorAll('.jp-tocItem-content').length >= {len(headings)}")
    page.screenshot(path=PICTURES / "lab-03-contents.png")
    shown = page.locator(".jp-tocItem-content").all_inner_texts()
    assert shown == [re.sub("[`*$]", "", heading) for heading in headings]


def test_an_assignment_stops_at_the_first_unwritten_exercise(page, opened):
    book = opened("ps1/ps1.ipynb")
    book.start()
    book.wait()
    saved = book.save()
    ((number, error),) = errors(saved)
    assert error == "NotImplementedError"
    assert "split_even" in code(saved)[number - 1].source
    assert "not written yet" in book.texts()


def test_an_assignment_with_its_exercises_written_runs_to_the_end(page, opened):
    notebook = nbformat.read(COPY / "ps1/ps1.ipynb", 4)
    answers = {cell.metadata.nbgrader.grade_id: cell.source
               for cell in assignment.make_notebook("ps1").cells
               if "nbgrader" in cell.metadata and cell.metadata.nbgrader.solution}
    for cell in notebook.cells:
        if (name := cell.metadata.get("nbgrader", {}).get("grade_id")) in answers:
            cell.source = answers[name]
    nbformat.write(notebook, COPY / "ps1/written.ipynb")
    book = opened("ps1/written.ipynb")
    book.start()
    book.wait()
    book.picture("lab-ps1")
    assert_whole(book.save(), page)


def test_a_live_plot_is_redrawn(page, opened):
    """d2l.Animator, which the trainings of Dive into Deep Learning draw with."""
    cell = nbformat.v4.new_code_cell("""\
import helpers, time
from d2l import mxnet as d2l

animator = d2l.Animator("epoch", "accuracy", xlim=[1, 6])
for epoch in range(1, 7):
    animator.add(epoch, 1 - 1 / epoch)
    time.sleep(1)""")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": {
        "name": "python3", "display_name": "Python 3"}}), COPY / "live.ipynb")
    book = opened("live.ipynb")
    book.start()
    seen = set()

    def ended():
        seen.update(page.locator(".jp-OutputArea-output").locator("svg, img").evaluate_all(
            "all => all.map(e => e.src || e.outerHTML)"))
        return book.idle()

    until(page, ended)
    page.screenshot(path=PICTURES / "lab-live.png")
    assert len(seen) >= 4
    saved = book.save()
    assert not errors(saved)
    assert len(code(saved)[0].outputs) == 1, "the last figure and no other"


# An answer in words that wants to do something on its reader's page.
WORDS = """My answer <script>document.title = 'stolen'</script><img src=x onerror="alert(1)">
[a](javascript:alert(1)) $\\href{javascript:alert(1)}{x}$

</pre><iframe srcdoc="<script>parent.document.title = 'stolen'</script>"></iframe> to the end"""


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The folder of marks, as notebooks/assignments/README.md says; one exercise is wrong."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "handed-in/ada").mkdir(parents=True)
    content = assignment.make_notebook("ps1")
    for cell in content.cells:
        key = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = {"why": WORDS, "even": "def split_even(batch, devices):\n"
                       "    return [batch.copyto(d) for d in devices]"}.get(key, cell.source)
    nbformat.write(content, folder / "handed-in/ada/ps1.ipynb")
    subprocess.run(["make", "grade", f"SUBMISSIONS={folder}/handed-in"], cwd=ROOT, check=True,
                   capture_output=True)
    return folder / "handed-in-marks"


def watch(page):
    """What a page should not do: {"dialogs": [...], "requests": [...]}, filled as it does it."""
    seen = {"dialogs": [], "requests": []}
    page.on("dialog", lambda dialog: (seen["dialogs"].append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: seen["requests"].append(request.url))
    return seen


BROKEN_WORDS = """() => {
    const broken = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode, range = document.createRange();
        for (const word of text.data.matchAll(/\\p{L}+/gu)) {
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            const lines = new Set([...range.getClientRects()].map(box => box.top));
            if (lines.size > 1 && !text.parentElement.closest("pre")) broken.push(word[0]);
        }
    }
    return broken;
}"""


@pytest.mark.parametrize("scheme, width", [("light", 1200), ("dark", 390)])
def test_a_student_reads_the_feedback(marked, page, scheme, width):
    seen = watch(page)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"file://{marked}/feedback/ada/ps1/ps1.html")
    page.screenshot(path=PICTURES / f"feedback-{scheme}.png", full_page=True)
    assert len(seen["requests"]) == 1 and not seen["dialogs"]     # itself, and nothing else
    assert "stolen" not in page.title() and page.locator("iframe, script, img").count() == 0
    assert page.locator("h1").first.inner_text().startswith("6 of 10 points")
    assert "shard 0 has shape" in page.locator("table").inner_text()
    assert "to be read" in page.locator("table").inner_text()
    assert "My answer <script>" in page.locator("pre.answer").last.inner_text()
    boxes = page.locator("math").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect().width)")
    assert boxes and min(boxes) > 3, "formulas are drawn, with no network"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(BROKEN_WORDS) == []


def test_a_teacher_marks_words_in_formgrader(marked, page, tmp_path):
    def points():
        with gradebook.open_gradebook(marked) as book:
            return book.find_submission("ps1", "ada").score

    assert points() == 6, "for the code; the words are not read yet"
    seen = watch(page)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", "--allow-root"]
    # Not by `make lab`, which asks nothing: a question would lie over what is below it.
    settings = {"apputils-extension/notification": {"fetchNews": "false"}}
    with running(command, marked, tmp_path, settings) as address:
        page.goto(address)
        page.click('.lm-MenuBar-itemLabel:text-is("Nbgrader")')
        page.click('li.lm-Menu-item:has-text("Formgrader") >> nth=0')
        form = page.frame_locator("iframe")
        form.locator('td:has-text("ps1")').first.wait_for()
        page.screenshot(path=PICTURES / "formgrader-assignments.png")
        assert form.locator(".alert-warning:visible, .alert-danger:visible").count() == 0
        form.locator('a:has-text("Manual Grading")').first.click()
        form.locator('td a:has-text("ps1")').click()      # the assignment
        form.locator('td a:has-text("ps1")').click()      # its notebook
        form.locator('td a:has-text("Submission #1")').click()
        form.locator("h1", has_text="Assignment 1").wait_for()
        answer = form.locator('pre:has-text("My answer")')
        assert "<script>" in answer.inner_text() and "to the end" in answer.inner_text()
        widths = form.locator("math").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect().width)")
        assert widths and min(widths) > 3
        score = form.locator("input.score").last
        score.scroll_into_view_if_needed()
        page.screenshot(path=PICTURES / "formgrader.png")
        score.fill("2")
        score.press("Tab")
        until(page, lambda: points() == 8)
        assert "stolen" not in page.title() and not seen["dialogs"]
        assert form.locator("iframe").count() == 0
