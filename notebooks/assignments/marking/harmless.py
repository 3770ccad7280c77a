"""Makes what students wrote safe for where it goes: it may be anything, and is never trusted.

Pages of our own are made with Jinja, which escapes everything that isn't marked as ours.
"""

import html

WORDS = 300   # most characters of a reason


def for_database(text):
    """Text that UTF-8 and SQLite can hold, and HTML and notebooks show: no lone surrogate and no
    control character but new lines and tabs."""
    text = str(text).encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def shorten(text, most=WORDS):
    """One line, of a length that can be read and of characters that can be shown."""
    text = str(text)[:2 * most].encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:most]


def for_terminal(text):
    """One line without control characters: no colours, no moves, no titles, nothing written
    backwards."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode()
                   for c in str(text))


def for_table(text):
    """One cell of a CSV file that no spreadsheet takes for a formula."""
    text = for_terminal(text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")) else text


def for_markdown(text):
    """Markdown that shows the text as it was typed: no HTML, link, picture or formula in it."""
    return f'<pre style="white-space: pre-wrap">{html.escape(for_database(text))}</pre>'


def find_fault_in_name(name):
    """Why a folder's name can't be used for a student, or None."""
    if not all(c.isprintable() for c in name):
        return "it has characters that can't be printed"
    if any(c in '<>"\\*?[]|' for c in name):
        return 'it has one of < > " \\ * ? [ ] |'
    if name != name.strip() or name.startswith("."):
        return "it begins or ends with a space, or begins with a full stop"
    if len(name) > 80:
        return "it has more than 80 characters"
    return None
