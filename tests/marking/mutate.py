"""Makes wrong solutions out of right ones, by program: `mutate(source)` yields each of them once.

Three kinds. General operators on the text are cosmic-ray's. Ours on the syntax tree are mistakes
that this course is about, and statements left out. `wrap(source)` leaves a solution as it is and
does something wrong around each call of it.
"""

import ast
import copy
import difflib
from typing import NamedTuple

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

GENERAL = [
    *("ReplaceBinaryOperator_" + pair for pair in (
        "Add_Sub", "Sub_Add", "Mul_Div", "Mul_Add", "Div_Mul", "Div_FloorDiv", "FloorDiv_Div",
        "FloorDiv_Mul", "Mod_FloorDiv", "Mod_Mul", "Pow_Mul")),
    *("ReplaceComparisonOperator_" + pair for pair in (
        "Eq_NotEq", "NotEq_Eq", "NotEq_Lt", "NotEq_Gt", "Lt_LtE", "Lt_GtE", "Lt_NotEq", "LtE_Lt",
        "LtE_Gt", "Gt_GtE", "Gt_LtE", "Gt_NotEq", "GtE_Gt", "GtE_Lt", "Is_IsNot", "IsNot_Is")),
    "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr",
    "ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer",
    "ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_USub",
    "ReplaceUnaryOperator_Delete_Not",
]


OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}


class Mutant(NamedTuple):
    change: str      # what was done and what the line has become; tells mutants of one source apart
    source: str


def mutate(source):
    """All mutants of a solution, without those that are the same program."""
    found = {}
    for operator, changed in [*_apply_general(source), *_apply_ours(source)]:
        try:
            key = ast.dump(ast.parse(changed))
        except SyntaxError:
            continue
        if key != ast.dump(ast.parse(source)) and key not in found:
            found[key] = operator, changed
    names, mutants = set(), []
    for operator, changed in found.values():
        name = f"{operator}: {_find_change(source, changed)}"
        while name in names:
            name += " (another)"
        names.add(name)
        mutants.append(Mutant(name, changed))
    return mutants


def _find_change(source, changed):
    """The lines that are new in `changed`, or else those that are gone, in one."""
    before, after = (ast.unparse(ast.parse(text)).splitlines() for text in (source, changed))
    lines = list(difflib.ndiff(before, after))
    for sign in "+-":
        new = [" ".join(line[2:].split()) for line in lines if line[0] == sign]
        if new and new != ["pass"]:
            return ("" if sign == "+" else "without ") + " / ".join(new)
    return "the order of lines"


def _apply_general(source):
    for name in GENERAL:
        operator, occurrence = get_operator(f"core/{name}")(), 0
        while changed := mutate_code(source, operator, occurrence):
            yield name, changed
            occurrence += 1


def _apply_ours(source):
    for operator in (_drop_statement, _change_expression):
        count = 0
        while True:
            tree = ast.parse(source)
            name = operator(tree, count)
            if name is None:
                break
            yield name, ast.unparse(ast.fix_missing_locations(tree))
            count += 1


def _drop_statement(tree, number):
    """Leave out the statement of that number; its name, None where there is no such number."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if not isinstance(statements, list) or isinstance(node, ast.Module):
                continue
            for place, statement in enumerate(statements):
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    continue  # a docstring
                if number == 0:
                    statements[place] = ast.Pass()
                    return "drop statement"
                number -= 1
    return None


def _change_expression(tree, number):
    """The change of that number; its name, None where there is no such number."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            for place, node in enumerate(value if isinstance(value, list) else [value]):
                for name, new in _list_changes(node, parent, field):
                    if number == 0:
                        if isinstance(value, list):
                            value[place] = new
                        else:
                            setattr(parent, field, new)
                        return name
                    number -= 1
    return None


def _list_changes(node, parent, field):
    """(name, what to put in the node's place) for each of our mistakes that it allows."""
    def call(name, *args):
        return ast.Call(ast.Name(name, ast.Load()), list(args), [])

    match node:
        case ast.Attribute(attr="copyto"):
            yield "as_in_context for copyto", _with(node, attr="as_in_context")
        case ast.Attribute(attr="sum"):
            yield "mean for sum", _with(node, attr="mean")
        case ast.Attribute(attr="mean"):
            yield "sum for mean", _with(node, attr="sum")
        case ast.Call(func=ast.Attribute(attr="copy", value=value)):
            yield "no copy", value
        case ast.Call(func=ast.Name(id="sum"), args=[ast.GeneratorExp() as items]):
            values = ast.ListComp(items.elt, items.generators)
            yield "mean for sum", ast.BinOp(call("sum", values), ast.Div(), call("len", values))
        case ast.Call(func=ast.Name(id="range"), args=[*_, last]) if len(node.args) < 3:
            yield "last left out", _with(node, args=[
                *node.args[:-1], ast.BinOp(last, ast.Sub(), ast.Constant(1))])
            if len(node.args) == 1:
                yield "first left out", _with(node, args=[ast.Constant(1), last])
        case ast.Call(func=ast.Name(id="len")):
            yield "2 for a length", ast.Constant(2)
        case ast.Call(func=ast.Name(id="float" | "int" | "abs" | "sorted" | "list" | "set"),
                      args=[value]):
            yield f"no {node.func.id}", value
        case ast.Subscript(slice=ast.Name() | ast.BinOp(), ctx=ast.Load()):
            yield "entry 0", _with(node, slice=ast.Constant(0))
        case ast.Assign(targets=[ast.Subscript(value=target, slice=ast.Slice(
                lower=None, upper=None))]):
            yield "rebinding", ast.Assign([_with(target, ctx=ast.Store())], node.value,
                                          lineno=node.lineno)
        case ast.AugAssign(target=target):
            yield "rebinding", ast.Assign(
                [target], ast.BinOp(_with(target, ctx=ast.Load()), node.op, node.value),
                lineno=node.lineno)
            yield "not added", ast.Assign([target], node.value, lineno=node.lineno)
            if other := OTHER.get(type(node.op)):
                yield "the other way", _with(node, op=other())
        case ast.Constant(value="float64"):
            yield "float32", ast.Constant("float32")
        case ast.keyword(arg="dtype"):
            yield "float32", ast.keyword("dtype", ast.Constant("float32"))
        case ast.keyword(arg="keepdims" | "key" | "axis" | "rcond"):
            pass
        case ast.IfExp():
            yield "never the other", node.body
            yield "always the other", node.orelse
        case ast.BoolOp(values=[first, *_, last]):
            yield "first condition only", first
            yield "last condition only", last
        case ast.If():
            yield "always", _with(node, test=ast.Constant(True))
            yield "never", _with(node, test=ast.Constant(False))
        case ast.Name(id="ValueError"):
            yield "another error", ast.Name("RuntimeError", ast.Load())
    if isinstance(parent, (ast.For, ast.comprehension)) and field == "iter":
        yield "last left out", ast.Subscript(call("list", node), ast.Slice(
            upper=ast.UnaryOp(ast.USub(), ast.Constant(1))), ast.Load())
        yield "in reverse", ast.Subscript(call("list", node), ast.Slice(
            step=ast.UnaryOp(ast.USub(), ast.Constant(1))), ast.Load())
    if isinstance(parent, ast.comprehension) and field == "ifs":
        yield "condition left out", ast.Constant(True)


def _with(node, **fields):
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


# Around the call of a solution `inner`: what is done before, with its result, and after. `args`
# are the arguments, `n` is which call it is, from 1.
AROUND = {
    "None the third time": "result = inner(*args)\nif n == 3: result = None",
    "NaN for all numbers": "result = nan(inner(*args))",
    "NaN the third time": "result = inner(*args)\nif n == 3: result = nan(result)",
    "through float32": "result = round32(inner(*args))",
    "changed arguments through float32": "result = inner(*args)\nfor a in flat(args): round32(a)",
    "last entry dropped": "result = inner(*args)\nresult = result[:-1]",
    "one entry more": "result = inner(*args)\nresult = result + result[-1:]",
    "entries in reverse": "result = inner(*args)\nresult = result[::-1]",
    "a string": "result = str(inner(*args))",
    "a list in a list": "result = [inner(*args)]",
    "a generator": "result = (x for x in inner(*args))",
    "equal to everything": "inner(*args)\nclass Yes:\n    __eq__ = lambda *a: True\n"
                           "    __lt__ = __le__ = __gt__ = __ge__ = __sub__ = __eq__\n"
                           "result = Yes()",
    "a billionth too much": "result = more(inner(*args))",
    "arguments a billionth more": "result = inner(*args)\nfor a in flat(args): more(a)",
    "the last call's result": "result, keep[0] = keep[0], inner(*args)\n"
                              "if n == 1: result = keep[0]",
    "called twice": "inner(*args)\nresult = inner(*args)",
    "nothing done the third time": "result = inner(*args) if n != 3 else keep[0]\nkeep[0] = result",
    "no error": "try: result = inner(*args)\nexcept ValueError: result = keep[0]\nkeep[0] = result",
    "always an error": "raise ValueError('no')",
    "lists emptied": "result = inner(*args)\nfor a in lists(args): a.clear()",
    "last popped": "result = inner(*args)\nfor a in lists(args): a.pop()",
    "lists extended": "result = inner(*args)\nfor a in lists(args): a.extend(a[-1:])",
    "lists in reverse": "result = inner(*args)\nfor a in lists(args): a.reverse()",
    "lists of copies": "result = inner(*args)\nfor a in lists(args): a[:] = [copied(x) for x in a]",
    "all entries the first": "result = inner(*args)\nfor a in lists(args): a[:] = a[:1] * len(a)",
    "arrays zeroed": "result = inner(*args)\nfor a in flat(args): a[:] = 0",
    "first array changed": "result = inner(*args)\nfor a in flat(args)[:1]: a += 1",
    "last array changed": "result = inner(*args)\nfor a in flat(args)[-1:]: a += 1",
    "arrays sorted": "result = inner(*args)\n"
                     "for a in flat(args): a[:] = a[::-1].copy()",
    "dicts changed": "result = inner(*args)\nfor a in args:\n"
                     "    isinstance(a, dict) and a.update({k: 2 * v for k, v in a.items()})",
    "dicts emptied": "result = inner(*args)\nfor a in args: isinstance(a, dict) and a.clear()",
    "gradients attached": "result = inner(*args)\n"
                          "for a in flat(args):\n    hasattr(a, 'attach_grad') and a.attach_grad()",
    "an argument returned": "inner(*args)\nresult = args[0]",
    "views of the result": "result = inner(*args)\nif type(result) is list and flat(result):\n"
                           "    result = [result[0]] * len(result)",
}
TOOLS = '''
import numpy as _np, mxnet as _mx, functools as _functools
def flat(value):
    if isinstance(value, (_np.ndarray, _mx.nd.NDArray)): return [value]
    if isinstance(value, dict): value = list(value.values())
    return [a for x in value for a in flat(x)] if isinstance(value, (list, tuple)) else []
def lists(value):
    if isinstance(value, (list, tuple)):
        inner = [a for x in value for a in lists(x)]
        return inner + [value] if isinstance(value, list) and value else inner
    return []
def copied(value):
    if isinstance(value, (_np.ndarray, _mx.nd.NDArray)): return value.copy()
    return [copied(x) for x in value] if isinstance(value, list) else value
def each(change, value):
    if isinstance(value, (list, tuple)): return type(value)(each(change, x) for x in value)
    if isinstance(value, (_np.ndarray, _mx.nd.NDArray)):
        value[:] = change(value); return value
    if isinstance(value, (int, float, _np.number)) and not isinstance(value, bool):
        return change(value)
    return value
def nan(value): return each(lambda x: x * float('nan'), value)
def more(value):
    return each(lambda x: x * (1 + 1e-9) if _np.dtype(getattr(x, 'dtype', 'f8')) == 'f8' else x,
                value)
def round32(value):
    return each(lambda x: x.astype('float32').astype(x.dtype) if hasattr(x, 'astype')
                else float(_np.float32(x)), value)
'''


def wrap(source, functions, dicts=False):
    """Mutants that call the solution's `functions` and do something wrong around it.

    dicts: whether some of the arguments are.
    """
    for name, body in AROUND.items():
        if name.startswith("dicts") and not dicts:
            continue
        lines = "\n    ".join(body.splitlines())
        wrapped = "".join(f"""
def wrap_{function}(inner, keep=[None], calls=[0]):
  @_functools.wraps(inner)
  def {function}(*args):
    calls[0] += 1
    n = calls[0]
    {lines}
    return result
  return {function}
{function} = wrap_{function}({function})
""" for function in functions)
        yield Mutant(f"around: {name}", f"{source}\n{TOOLS}{wrapped}")
