"""Notebook cells as Python sees them, for the tests that read chapters' code."""

import ast

from IPython.core.inputtransformer2 import TransformerManager

# Magics such as %%time whose cell is Python all the same. Below others, %%bash, it is not.
AROUND_PYTHON = {"%%capture", "%%prun", "%%time", "%%timeit"}


def tags(cell):
    return cell.metadata.get("tags", [])


def is_open(cell):
    """Whether it is code that a learner reads as she goes: not folded, and no exercise's answer."""
    return cell.cell_type == "code" and not {"fold", "solution"} & set(tags(cell))


def tree(cell):
    """The syntax tree of a code cell. Line numbers are the cell's, magics are calls in it."""
    first, _, rest = cell.source.partition("\n")
    source = cell.source
    if first.split(maxsplit=1)[:1] and first.split(maxsplit=1)[0] in AROUND_PYTHON:
        source = f"pass\n{rest}"
    return ast.parse(TransformerManager().transform_cell(source))
