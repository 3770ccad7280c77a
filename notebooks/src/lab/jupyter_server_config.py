"""JupyterLab as `make lab` opens it: the course is the first screen, and reading leaves no trace.

Jupyter finds this file through JUPYTER_CONFIG_PATH, and reads the reader's own settings as well;
what the command line says goes before both. Lab's settings are beside it, in overrides.json5: they
are defaults, which the reader's choice in JupyterLab's menu Settings replaces. So is custom.css,
for readers who have none of their own.
"""

import contextlib
import json
import logging
import os
import re
from pathlib import Path

from ipykernel.ipkernel import IPythonKernel
from jupyter_core.paths import jupyter_config_dir
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

c = get_config()  # noqa: F821  (Jupyter supplies it)

HERE = Path(__file__).resolve().parent
CHAPTER = re.compile(r"notebooks/(?:deeper/)?\d\d_\w+\.ipynb")
START = "notebooks/start.md"
# What JupyterLab notes in a cell when somebody folds, unfolds or runs it.
NOTES = ["collapsed", "jp-MarkdownHeadingCollapsed", "jupyter", "scrolled", "execution"]
# Which cells somebody has run, by chapter: {"notebooks/01_….ipynb": [cell ids]}.
RUN = "build/run-in-lab.json"


class Contents(AsyncLargeFileManager):
    """Jupyter's own, except that to open, read and save a chapter doesn't change its file.

    JupyterLab writes into each notebook that it opens which Python runs it, 3.11.7 or 3.11.9, and
    into each cell whether it is folded. Git would take that for the reader's work, and an update
    of the course would stop at it. Here the file's own entries stay, and an answer or a
    check that was looked at is folded again when the chapter is opened the next time.

    The first page is shown with a mark beside each chapter whose cells have all been run.
    """

    async def get(self, path, content=True, *args, **options):
        model = await super().get(path, content, *args, **options)
        if content and is_chapter(model, path):
            # What the kernel is about to say: JupyterLab finds nothing to note, so the tab isn't
            # marked as changed, and closing it raises no question.
            model["content"]["metadata"]["language_info"] = dict(IPythonKernel.language_info)
        if content and path.strip("/") == START and isinstance(model["content"], str):
            model["content"] = with_marks(model["content"], Path(self.root_dir))
        return model

    async def save(self, model, path=""):
        if path.strip("/") == START and isinstance(model.get("content"), str):
            model["content"] = without_marks(model["content"])
        if is_chapter(model, path) and model.get("content"):
            try:
                old = json.loads(Path(self._get_os_path(path)).read_text("utf-8"))
                note_run(model["content"], path.strip("/"), Path(self.root_dir))
                keep_view(model["content"], old)
            except (OSError, ValueError, LookupError, TypeError):
                pass    # the file is gone or no notebook: there is nothing to keep
        return await super().save(model, path)

    def mark_trusted_cells(self, nb, path=""):
        """The chapters come with the program that shows them. Jupyter would warn of each."""
        if CHAPTER.fullmatch(path.strip("/")):
            self.notary.sign(nb)
        super().mark_trusted_cells(nb, path)


def is_chapter(model, path):
    return model.get("type") == "notebook" and CHAPTER.fullmatch(path.strip("/"))


def read_run(root):
    try:
        return dict(json.loads((root / RUN).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}   # nothing was run yet, or the file is torn: it is only for marks


def note_run(notebook, path, root):
    """Add the cells that were run, by JupyterLab's note of the time, to those of earlier days."""
    ids = {cell["id"] for cell in notebook["cells"] if "execution" in cell["metadata"]}
    run = read_run(root)
    if ids <= set(run.get(path, [])):
        return
    run[path] = sorted(ids | set(run.get(path, [])))
    part = (root / RUN).with_suffix(".part")
    with contextlib.suppress(OSError):    # for want of a mark no chapter stays unsaved
        part.parent.mkdir(exist_ok=True)
        part.write_text(json.dumps(run), "utf-8")
        part.replace(root / RUN)


def with_marks(text, root):
    """The first page's `text` with ✓ in the line of each chapter that was run, answers apart."""
    for path, ids in read_run(root).items():
        try:
            cells = json.loads((root / path).read_text("utf-8"))["cells"]
        except (OSError, ValueError, LookupError):
            continue    # a chapter of an earlier version of the course
        due = {cell["id"] for cell in cells if cell["cell_type"] == "code"
               and "solution" not in cell["metadata"].get("tags", [])}
        if due <= set(ids):
            link = re.escape(path.removeprefix("notebooks/"))
            text = re.sub(rf"^\| ?(●?) ?(\|.*\({link}\))", r"| \1 ✓ \2", text, flags=re.MULTILINE)
    return text


def without_marks(text):
    """The first page's `text` as its file has it: what `with_marks` adds is not the reader's."""
    text = re.sub(r"^\| ● ✓ \|", "| ● |", text, flags=re.MULTILINE)
    return re.sub(r"^\|  ✓ \|", "| |", text, flags=re.MULTILINE)


def keep_view(new, old):
    """Put into `new`, in place, what `old` says of the language, and of cells folded and run."""
    new["metadata"]["language_info"] = old["metadata"]["language_info"]
    before = {cell["id"]: cell["metadata"] for cell in old["cells"]}
    for cell in new["cells"]:
        if (metadata := before.get(cell["id"])) is not None:
            for key in NOTES:
                cell["metadata"].pop(key, None)
                if key in metadata:
                    cell["metadata"][key] = metadata[key]


# This server alone: another one, say nbgrader's started in a terminal in here, is Jupyter's own.
others = os.environ.get("JUPYTER_CONFIG_PATH", "").partition(os.pathsep)[2]
os.environ["JUPYTER_CONFIG_PATH"] = others

c.ServerApp.ip = "127.0.0.1"
c.ServerApp.root_dir = str(HERE.parents[2])
c.LabApp.default_url = "/lab/tree/notebooks/start.md"
c.LabApp.app_settings_dir = str(HERE)     # overrides.json5, page_config.json5
c.LabApp.custom_css = True
c.ServerApp.tornado_settings = {    # the first custom.css that is found
    "static_custom_path": [str(Path(jupyter_config_dir()) / "custom"), str(HERE)]}
c.ServerApp.contents_manager_class = Contents

# The list of files shows what is there to be read; `marking` and `source` in assignments/ hold
# answers. What is hidden opens by a link all the same.
c.ContentsManager.hide_globs.extend(["conftest.py", "src", "marking", "source"])

# Code and results go through ports of this machine, where its other users can listen in: a kernel
# warns of it, unless they are encrypted.
c.MappingKernelManager.transport_encryption = "auto"

# For teachers, and they start a JupyterLab of their own (notebooks/assignments/README.md): here it
# would warn that it has no settings. page_config.json5 takes its menu and buttons away.
c.ServerApp.jpserver_extensions = {f"nbgrader.server_extensions.{name}": False for name in [
    "assignment_list", "course_list", "formgrader", "validate_assignment"]}

# Jupyter Server 2.21 waits for three pings' time before it gives a connection up; Tornado 6.6 warns
# of every time-out longer than one. With one, Jupyter closed each connection at its first ping:
# so the setting stays, and the message goes.
logging.getLogger("tornado.general").addFilter(
    lambda record: not record.getMessage().startswith("The websocket_ping_timeout"))
