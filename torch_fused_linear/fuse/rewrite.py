"""Puts other code into functions, in which calls of layers and activations are in_code.py's.

A function stays the same object with its name, file, lines, closure, decorators and attributes; its
code is compiled anew with its file. Marks on layers say for which of them it matters.
"""

import ast
import itertools
import threading
import weakref
from functools import partial
from types import CodeType, FunctionType

from torch import nn

from . import in_code, plain
from .runs import Form, Step, halved, path_of, position, step_of
from .source import ORIGINALS, Text, code_of, codes_in, functions_in, key_of, warned_before

SEQUENTIAL = nn.Sequential.forward
_SEQUENCE = f"""
if {plain.MARK!r} in self.__dict__:
    return {in_code.NAME}.run_sequential(self, input)
"""
# in_code.py's names for calls, by their numbers in the text; of an ``if`` that takes a begun call,
# the name that holds it.
Roles = dict[int, str]
# What comes later here leaves open what those before decide.
ORDER = ("last", "last_product", "step", "drawn", "first", "product", "halves", "later")
_rewritten: weakref.WeakKeyDictionary[FunctionType, Roles] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def roles_of(text: Text, steps: list[Step]) -> Roles:
    """Those of calls that become one."""
    found = {step.node: "step" for step in steps[:-1]} | {steps[-1].node: "last"}
    for form in steps[0].forms:
        found |= {step.node: "step" for step in form.steps}
        found[form.node] = "product" if len(steps) > 1 else "last_product"
        found |= {form.steps[0].node: "later", form.halves: "halves"} | first_of(form)
    for step, after in itertools.pairwise(steps):
        if after.is_square and step is not steps[0]:
            found[step.node] = "later"
        elif not text.is_still(after) and found.get(step.node) == "step":
            found[step.node] = "drawn"
        if after.guard is not None and isinstance(after.data, ast.Name):
            found[after.guard] = after.data.id
    return {text.numbers[node]: role for node, role in found.items() if node in text.numbers}


def first_of(form: Form) -> dict[ast.AST, str]:
    """The role of what is done with the layer of two that runs first before the other runs, with
    what calls that one."""
    act, gate, *_ = form.steps
    order = sorted(form.steps, key=lambda step: position(step.node))
    one, *other = (step for step in order if step is not act)
    if not other:
        return {}
    is_activated = one is gate and order[-1] is other[0]
    return {(act if is_activated else one).node: f"first {ast.unparse(other[0].callee)}"}


def united(one: Roles, other: Roles) -> Roles:
    """Both, of which the later in ORDER wins."""
    differ = {at for at in one.keys() & other.keys() if one[at] != other[at]}
    most_open = partial(max, key=lambda role: ORDER.index(role.split()[0]))
    return one | other | {at: most_open(one[at], other[at]) for at in differ}


def rewrite(chosen: dict[Text, Roles], with_sequential: bool) -> None:
    """Puts the code in, beside what is rewritten in the functions already; all is compiled before
    the first function changes."""
    with _lock:
        wanted = {}
        for text, roles in chosen.items():
            is_ours = key_of(text.function.__code__) in ORIGINALS
            before = _rewritten.get(text.function, {}) if is_ours else {}
            if united(before, roles) != before:
                wanted[text] = united(before, roles)
        if with_sequential and key_of(SEQUENTIAL.__code__) not in ORIGINALS:
            wanted[Text(SEQUENTIAL)] = {}
        codes = _compiled(wanted)
        for text, code in codes.items():
            text.function.__globals__[in_code.NAME] = in_code
            ORIGINALS[key_of(code)] = text.code
            _rewritten[text.function] = wanted[text]
            text.function.__code__ = code


def put_back() -> None:
    """Gives every function the code that it had, but one that somebody has changed since."""
    with _lock:
        for function in list(_rewritten):
            function.__code__ = code_of(function)
        ORIGINALS.clear()
        _rewritten.clear()


@warned_before()
def _compiled(wanted: dict[Text, Roles]) -> dict[Text, CodeType]:
    """The functions' new code, of their files compiled anew."""
    found = {}
    for source, path, flags in {text.file for text in wanted}:
        tree = ast.parse(source)
        nodes = functions_in(tree)
        texts = [text for text in wanted if text.file == (source, path, flags)]
        for text in texts:
            (node,) = nodes[text.key]
            _Rewriter(wanted[text], node).visit(node)
            if text.function is SEQUENTIAL:
                (look_for_mark,) = ast.parse(_SEQUENCE).body
                line = max(n.lineno for n in ast.walk(node) if isinstance(n, ast.Call))
                node.body.insert(-2, ast.increment_lineno(look_for_mark, line - 3))  # the loop's
            ast.fix_missing_locations(node)
        codes = codes_in(compile(tree, path, "exec", flags, dont_inherit=True))
        by_key = {(code.co_name, code.co_firstlineno): code for code in codes}
        found |= {text: by_key[text.key] for text in texts}
    return found


class _Rewriter(ast.NodeTransformer):
    """Changes the calls of one function that have a role."""

    def __init__(self, roles: Roles, node: ast.AST) -> None:
        numbered = enumerate(ast.walk(node))
        self.roles = {part: roles[number] for number, part in numbered if number in roles}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if role := self.roles.get(node):
            data = halved(node) if role == "halves" else step_of(node).data
            is_method = data is getattr(node.func, "value", None)
            called = [_name(f"method_{node.func.attr}"), data] if is_method else [node.func]
            role, _, other = role.partition(" ")  # of the first of two: what calls the other
            if other:
                path = path_of(ast.parse(other, "", "eval").body)
                called.insert(0, ast.Tuple([ast.copy_location(p, node) for p in path], ast.Load()))
            node.func, node.args = _name(role), [*called, *node.args]
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if role := self.roles.get(node):
            power = [_name("power")] if isinstance(node.op, ast.Pow) else []
            call = ast.Call(_name(role), [*power, node.left, node.right], [])
            return ast.copy_location(call, node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if name := self.roles.get(node):
            value = ast.Call(_name("end"), [ast.Name(name, ast.Load())], [])
            end = ast.Assign([ast.Name(name, ast.Store())], value)
            node.orelse.insert(0, ast.copy_location(end, node.test))
        return node


def _name(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(in_code.NAME, ast.Load()), name, ast.Load())
