"""The course as a web site, from the executed notebooks: `make book`. Nothing is run for it."""

from base64 import b64decode
from hashlib import sha256
from pathlib import Path

import nbformat
from docutils import nodes

project = "Many devices, one model"
author = ""
html_title = project
copyright = "Apache License 2.0"

extensions = ["myst_nb", "sphinx-mathjax-offline"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
exclude_patterns = ["assignments", "src", "figures", "book", "**/.ipynb_checkpoints"]

html_theme = "sphinx_book_theme"
html_theme_options = {
    "use_download_button": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "article_footer_items": ["prev-next.html", "source.html"],
}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["book.css"]
html_extra_path = ["../src"]  # what an author edits, beside the page that is made from it
html_baseurl = ""


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


def setup(app):
    app.connect("doctree-read", describe_figures)
