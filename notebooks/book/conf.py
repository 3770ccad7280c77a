"""The course as a web site, from the executed notebooks: `make book`. Nothing is run for it."""

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
html_extra_path = ["../src"]  # what an author edits, beside the page that is made from it
html_baseurl = ""
