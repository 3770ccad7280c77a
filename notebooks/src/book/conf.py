"""The course as a web site, from the executed notebooks: `make book`. Nothing is run for it.

The recipe puts index.md and the chapters side by side into build/book-source, which is what Sphinx
reads; everything else of this folder it finds here.
"""

import json
import re
import sys
from base64 import b64decode
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from shutil import copyfile

import nbformat
from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from pygments.formatters import HtmlFormatter
from sphinx.highlighting import PygmentsBridge
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

SRC = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SRC))

import build  # noqa: E402
import course  # noqa: E402

project = html_title = "Many devices, one model"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx-mathjax-offline"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
copybutton_selector = "div.highlight pre:not(.cell_output pre)"    # code, not what it printed

html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "pygments_dark_style": "a11y-dark",   # comments are quieter than code, as in the light
    "navbar_persistent": [],  # by default a second search box, above the one in the side bar
    "article_footer_items": ["source.html"],
    "footer_content_items": ["licence.html"],
}

# Where the course is published, if anywhere: buttons that lead there.
repository = course.repository()
if repository:
    html_theme_options |= {
        "repository_url": repository,
        "path_to_docs": "notebooks/src",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
    }

html_favicon = "static/favicon.svg"
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["book.css"]
html_use_index = False


# Pages that there are no more, and where what is left of them is told.
MOVED = {
    "map": "deeper/20_seven_ways_computed",
    "15_many_machines": "15_kill_and_resume",
    "deeper/01_three_ways_to_divide_a_network": "18_tensor_parallelism",
    "deeper/03_all_reduce_against_the_clock": "deeper/03_more_all_reduces",
    "deeper/05_listings_you_will_meet": "deeper/05_mxnets_surprises",
    "deeper/07_kvstores_cases": "deeper/05_mxnets_surprises",
    "deeper/08_what_the_second_device_brings": "deeper/08_where_the_memory_goes",
    "deeper/10_a_slow_link": "10_asynchrony_and_overlap",
    "deeper/10_a_time_budget_that_closes": "10_asynchrony_and_overlap",
    "deeper/11_counting_operations_predicting_gpus": "deeper/11_costs_on_paper",
    "deeper/11_telling_constants_apart": "11_how_far_it_scales",
    "deeper/12_mistakes_with_unequal_shards": "deeper/14_ddps_cases",
    "deeper/12_when_a_helper_pays": "12_unequal_devices",
    "deeper/13_resnet_twice": "deeper/04_why_float32_jumps",
    "deeper/13_what_dataparallel_costs": "13_the_same_in_pytorch",
    "deeper/14_overlap_on_a_link_that_matters": "deeper/14_what_overlap_is_worth",
    "deeper/15_costs_on_paper": "deeper/11_costs_on_paper",
}

chapters = cache(course.chapters)


def write_chapters(app, docname, source):
    """End the first page with the table of chapters and, for the side bar, a list of each part.

    A chapter ends with a list of its deeper notebooks, which the side bar folds below it.
    """
    parts = chapters(Path(app.srcdir))
    if docname == "index":
        # index.md lies beside this file, and Sphinx reads a copy in build/book-source.
        source[0] = re.sub(r"\]\(\.\./\.\./(\d\d_|deeper/)", r"](\1", source[0])
        source[0] = source[0].replace("](../drawings/", "](../../notebooks/src/drawings/")
        if repository:
            source[0] = source[0].replace("its repository", f"[its repository]({repository})")
        source[0] += f"\n{course.short_path(parts)}\n\n{course.table(parts, '', True)}\n"
        for name, rows in parts:
            files = [row["file"] for row in rows if not row["deeper"]]
            source[0] += toctree(files, f":caption: {name}")
    else:
        deeper = [f"{row['title']} <{row['file']}>" for _, rows in parts for row in rows
                  if row["file"].startswith(f"deeper/{docname[:2]}_")]
        if deeper and not docname.startswith("deeper/"):
            notebook = nbformat.reads(source[0], 4)
            notebook.cells.append(nbformat.v4.new_markdown_cell(toctree(deeper)))
            source[0] = nbformat.writes(notebook)


def toctree(entries, *options):
    """Markdown that puts pages into the side bar, and shows nothing where it stands."""
    return "\n".join(["", "```{toctree}", ":hidden:", *options, "", *entries, "```", ""])


class FoldAnswers(SphinxTransform):
    """Fold each section "Answer 1". It is no section any more, so the contents don't list it."""

    default_priority = 500

    def apply(self):
        for section in list(self.document.findall(nodes.section)):
            if re.fullmatch(r"Answer (\d+|to Your turn)", title := section[0].astext()):
                # The anchor is within: a browser unfolds what contains the one that it goes to.
                begin = (f'<details class="answer"><summary>{title}</summary>'
                         f'<div id="{section["ids"][0]}">')
                section.replace_self([nodes.raw("", begin, format="html"), *section[1:],
                                      nodes.raw("", "</div></details>", format="html")])


class LineByLine(HtmlFormatter):
    """Wraps each line, so that a long one can go on below, further in than it began (book.css).

    Where it has no space it may break behind a bracket or a dot, rather than within a name.
    """

    def _format_lines(self, tokensource):
        for is_code, line in super()._format_lines(tokensource):
            text = re.sub("<[^>]*>", "", line)
            indent = len(text) - len(text.lstrip(" "))
            line = re.sub(r'(<span class="[po]">[(\[{.]+</span>)', r"\1<wbr>", line)
            yield is_code, f'<span class="line" style="--indent: {indent}">{line}</span>'


PygmentsBridge.html_formatter = LineByLine


class KeepFromSearch(SphinxPostTransform):
    """Search finds no word of what cells keep folded."""

    default_priority = 200      # MyST-NB has folded them at 199

    def run(self):
        for node in self.document.findall(HideCodeCellNode):
            node["classes"].append("no-search")


def begin_folded(translator, node):
    """A cell's code or its output, closed, below its label, in which `names` are code.

    MyST-NB writes an "admonition", and for screen readers it puts "Toggle hidden content" in the
    label's place.
    """
    label = "What comes out"
    if node[0].get("nb_element") == "cell_code_source":
        label = re.sub("`([^`]+)`", r"<code>\1</code>", escape(node["prompt_show"]))
    translator.body.append(f'<details class="folded"><summary>{label}</summary>')


def end_folded(translator, node):
    translator.body.append("</details>")


def describe_figures(app, doctree):
    """Give each figure the text that `helpers.plotting.show` put beside it: MyST-NB doesn't."""
    path = Path(app.env.doc2path(app.env.docname))
    cells = nbformat.read(path, 4).cells if path.suffix == ".ipynb" else []
    texts = {sha256(b64decode(output.data["image/png"])).hexdigest():
             output.metadata["image/png"]["alt"]
             for cell in cells for output in cell.get("outputs", [])
             if "image/png" in output.get("data", {})}
    for image in doctree.findall(nodes.image):
        if text := texts.get(Path(image["uri"]).stem):  # MyST-NB names files by this sum
            image["alt"] = text


def offer_notebooks_only(app, pagename, templatename, context, doctree):
    """No button to download the Markdown of a page that is no chapter."""
    if pagename == "index":
        context["page_source_suffix"] = ""


def edit_sources(app, pagename, templatename, context, doctree):
    """What is edited of a notebook is the source that it is made from."""
    for group in context["header_buttons"]:
        for button in group.get("buttons", []):
            if button["label"] == "source-edit-button":
                button["url"] = button["url"].removesuffix(".ipynb") + ".py"


def pass_over_deeper(app, pagename, templatename, context, doctree):
    """Chapters lead to chapters. A deeper notebook leads to its chapter and to the next one."""
    relations = app.builder.relations
    if pagename not in relations:   # the search
        return
    for direction, place in (("prev", 1), ("next", 2)):
        name = relations[pagename][place]
        while name and name.startswith("deeper/"):
            name = relations[name][place]
        context[direction] = None  # at the ends of the book
        if name:
            context[direction] = {
                "link": app.builder.get_relative_uri(pagename, name),
                "title": app.builder.render_partial(app.env.titles[name])["title"]}


def name_folded(app, pagename, templatename, context, doctree):
    """Say what an arrow in the side bar opens: the theme gives it no name."""
    by_theme = context["generate_toctree_html"]

    def generate(**options):
        tree = by_theme(**options)
        for summary in tree.select("summary"):
            summary["title"] = summary["aria-label"] = "Optional notebooks"
        return tree

    context["generate_toctree_html"] = generate


def write_sources(app, error):
    """Put what an author edits beside each chapter's page, which leads to it."""
    if not error:
        for path in build.sources(SRC.parent):
            target = app.outdir / f"{course.key(path)}.py"
            target.parent.mkdir(exist_ok=True)
            copyfile(path, target)


def write_moved(app, error):
    """At the address of a page that there is no more, lead to the one that tells what is left."""
    if not error:
        for old, new in MOVED.items():
            title = app.env.titles[new].astext()  # a KeyError where there is no such page
            address = app.builder.get_relative_uri(old, new)
            (app.outdir / f"{old}.html").write_text(
                f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Moved</title>'
                f'<meta http-equiv="refresh" content="3; url={address}">'
                f'<p>This page is gone. What is left of it is in '
                f'<a href="{address}">{escape(title)}</a>.</p></html>\n', "utf-8")


def write_pages(app, error):
    """Put all pages into a script: from a file, search can load no page to quote from it."""
    if not error:
        pages = {f"{name}.html": (app.outdir / f"{name}.html").read_text("utf-8")
                 for name in sorted(app.env.found_docs)}
        (app.outdir / "_static/pages.js").write_text(f"const PAGES = {json.dumps(pages)};", "utf-8")


def setup(app):
    # Light or dark as the reader's system is; the theme does so too, but only after an error.
    app.add_js_file(None, body='document.documentElement.dataset.mode ||= "auto";')
    app.add_transform(FoldAnswers)
    app.add_post_transform(KeepFromSearch)
    app.add_node(HideCodeCellNode, override=True, html=(begin_folded, end_folded))
    app.connect("source-read", write_chapters)
    app.connect("doctree-read", describe_figures)
    app.connect("html-page-context", offer_notebooks_only)
    app.connect("html-page-context", pass_over_deeper)
    # After the theme, which does its part at 501 at the latest.
    app.connect("html-page-context", edit_sources, priority=502)
    app.connect("html-page-context", name_folded, priority=502)
    app.connect("build-finished", write_sources)
    app.connect("build-finished", write_moved)
    app.connect("build-finished", write_pages)
