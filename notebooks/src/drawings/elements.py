"""What the drawings are made of: SVG elements, colours, the page, and how files are written.

A drawing is a list of elements, each a string made by one of the functions below, and `page` puts
them on white. A program `draw_*.py` has a table of its drawings, DRAWINGS, and ends with
`write(DRAWINGS)`. Only the standard library is needed.
"""

from pathlib import Path
from xml.sax.saxutils import escape

# As in helpers/plotting.py; a test holds them equal, since that one needs matplotlib.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#888888"
PALE_BLUE, PALE_ORANGE, PALE_GREEN, PALE_GREY = "#cfe5f2", "#fbe8c3", "#cdebe1", "#eeeeee"
LIGHT_BLUE, LIGHT_GREY = "#7db8d9", "#bbbbbb"  # between the two others, in grey as well
DARK_GREEN, RED = "#006b4e", "#b03000"  # of words: of what is exchanged, and of what is wrong
FRAME = "#555555"  # of a cell
WORDS = 18  # units: about 11 pixels where a drawing 640 wide is shown 390 pixels wide


def element(name, inside="", **attributes):
    """`<name …>inside</name>`; in a keyword `_` stands for `-`, and a last `_` for nothing."""
    words = [name]
    for key, value in attributes.items():
        if isinstance(value, (int, float)):
            value = f"{value:.2f}".rstrip("0").rstrip(".")
        words.append(f'{key.rstrip("_").replace("_", "-")}="{value}"')
    opening = " ".join(words)
    return f"<{opening}>{inside}</{name}>" if inside else f"<{opening}/>"


def group(elements, **attributes):
    """Elements that belong together."""
    return element("g", "\n" + "\n".join(elements) + "\n", **attributes)


def words(x, y, text, size=WORDS, anchor="middle", bold=False, **attributes):
    """A line of text whose baseline is at `y`."""
    if bold:
        attributes["font_weight"] = "bold"
    return element("text", escape(text), x=x, y=y, font_size=size, text_anchor=anchor, **attributes)


def box(x, y, width, height, fill="white", stroke="black", **attributes):
    """A rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke,
                   **attributes)


def line(x1, y1, x2, y2, stroke="black", width=2, **attributes):
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width,
                   **attributes)


def arrow(x1, y1, x2, y2, color="black", width=2, dashed=False, **attributes):
    """An arrow, its tip at the second point."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    along_x, along_y = (x2 - x1) / length, (y2 - y1) / length
    head = 8 + width
    half = 4 + 0.9 * width
    neck_x, neck_y = x2 - head * along_x, y2 - head * along_y
    left = f"{neck_x - half * along_y:.1f},{neck_y + half * along_x:.1f}"
    right = f"{neck_x + half * along_y:.1f},{neck_y - half * along_x:.1f}"
    if dashed:
        attributes["stroke_dasharray"] = "6 4"
    shaft = line(x1, y1, neck_x, neck_y, color, width, **attributes)
    tip = element("polygon", points=f"{x2:.1f},{y2:.1f} {left} {right}", fill=color)
    return shaft + tip


def page(width, height, title, description, elements):
    """A whole drawing on white, so that it can be read on a dark page as well."""
    heading = [element("title", escape(title)), element("desc", escape(description))]
    background = box(0, 0, width, height, "white", "none")
    lines = "\n".join([*heading, background, *elements])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" role="img">\n'
            f"{lines}\n</svg>\n")


def write(drawings, folder=Path(__file__).parent):
    """Write `{name: function that draws}` into `folder`, each as `name.svg`."""
    for name, draw in drawings.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8", newline="\n")
