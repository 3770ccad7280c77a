"""Reads the drawings of `notebooks/src/drawings`, for tests of what they say."""

from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(__file__).parents[2] / "notebooks/src/drawings"
SVG = "{http://www.w3.org/2000/svg}"


def read(name):
    """The root element of a drawing."""
    return ElementTree.parse(FOLDER / f"{name}.svg").getroot()


def classes(element):
    """The classes of an element."""
    return element.get("class", "").split()


def with_class(root, name):
    """All elements below `root` that have a class."""
    return [element for element in root.iter() if name in classes(element)]


def texts(element):
    """The lines of text in an element, in their order."""
    return [text.text for text in element.iter(SVG + "text")]
