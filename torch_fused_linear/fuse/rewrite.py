"""Puts other code into functions, in which calls of layers and activations are in_code.py's.

A function stays the same object with its name, file, lines, closure, decorators and attributes; its
code is compiled anew with its file. Marks on layers say for which of them it matters.
"""

from __future__ import annotations

import ast
import itertools
import threading
import weakref
from collections.abc import Iterable
from types import CodeType, FunctionType

from torch import nn

from .._torch_internals import forget_compiled
from . import in_code
from .runs import Form, Product, is_torch_chunk
from .source import ORIGINALS, Text, codes_in, functions_in
from .syntax import Step

SEQUENTIAL = nn.Sequential.forward
_SEQUENCE = f"""
if {in_code.MARK!r} in self.__dict__:
    return {in_code.NAME}.run_sequential(self, input)
"""
# Of a function: the numbers in its text of calls that become one, for each place.
Groups = set[tuple[int, ...]]
_rewritten: weakref.WeakKeyDictionary[FunctionType, Groups] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def is_rewritten(text: Text, steps: Iterable[Step]) -> bool:
    """Whether these calls are in_code.py's, and one."""
    return text.numbers_of(steps) in _rewritten.get(text.function, set())


def is_sequence_rewritten() -> bool:
    return SEQUENTIAL in ORIGINALS


def rewrite(chosen: dict[Text, Groups], with_sequential: bool) -> None:
    """Puts the code in, beside what is rewritten in the functions already.

    All is compiled before the first function changes.
    """
    with _lock:
        wanted = {}
        for text, groups in chosen.items():
            before = _rewritten.get(text.function, set())
            if not groups <= before:
                wanted[text] = groups | before
        if with_sequential and not is_sequence_rewritten():
            wanted[Text(SEQUENTIAL)] = set()
        codes = _compiled(wanted)
        for text, code in codes.items():
            text.function.__globals__[in_code.NAME] = in_code
            ORIGINALS.setdefault(text.function, text.code)
            _rewritten[text.function] = wanted[text]
            text.function.__code__ = code
        if codes:
            forget_compiled()


def put_back() -> None:
    """Gives every function the code that it had."""
    with _lock:
        for function, code in list(ORIGINALS.items()):
            function.__code__ = code
        ORIGINALS.clear()
        _rewritten.clear()
        forget_compiled()


def _compiled(wanted: dict[Text, Groups]) -> dict[Text, CodeType]:
    """The functions' new code, of their files compiled anew."""
    found = {}
    for source, path, flags in {text.file for text in wanted}:
        tree = ast.parse(source)
        nodes = functions_in(tree)
        texts = [text for text in wanted if text.file == (source, path, flags)]
        for text in texts:
            (node,) = nodes[text.key]
            _Rewriter(text, wanted[text], node).visit(node)
            if text.function is SEQUENTIAL:
                _look_for_mark(node)
        ast.fix_missing_locations(tree)
        codes = codes_in(compile(tree, path, "exec", flags, dont_inherit=True))
        found |= {text: codes[text.key][0] for text in texts}
    return found


def _look_for_mark(node: ast.FunctionDef) -> None:
    """Before the loop of nn.Sequential."""
    loop = next(k for k, n in enumerate(node.body) if isinstance(n, ast.For))
    (added,) = ast.parse(_SEQUENCE).body
    for part in ast.walk(added):
        ast.copy_location(part, node.body[loop])
    node.body.insert(loop, added)


class _Rewriter(ast.NodeTransformer):
    """Changes the chosen calls of one function, in another tree of its text.

    Attributes:
        roles: of calls and products, in_code.py's name for each.
        methods: calls of a method, as ``h.relu()``.
        ends: of an ``if`` that takes a begun call, the name that holds it where it does not.
    """

    def __init__(self, text: Text, groups: Groups, node: ast.AST) -> None:
        self.twins = dict(zip(ast.walk(text.node), ast.walk(node)))
        self.roles: dict[ast.AST, str] = {}
        self.methods: set[ast.AST] = set()
        self.ends: dict[ast.AST, str] = {}
        chosen = set(itertools.chain(*groups))
        links = {pair for group in groups for pair in itertools.pairwise(group)}
        inner = {after for _, after in links}
        runs = [list(zip(run, text.numbers_of(run))) for run in text.runs]
        for step, number in itertools.chain(*runs):
            if isinstance(step, Product) and number in chosen:
                for form in step.forms:
                    self._set("later", form.act)
                    self._set("step", *form.layers)
                    self._set("halves", form.halves)
        for run in runs:
            for (step, number), (after, next_number) in zip(run, [*run[1:], (None, None)]):
                is_linked = (number, next_number) in links
                if number in chosen and isinstance(step, Product):
                    role = "product" if is_linked else "last_product"
                    self._set(role, *step.forms)
                elif number in chosen:
                    is_squared = is_linked and number in inner and after.is_square
                    role = "later" if is_squared else "step" if is_linked else "last"
                    self._set(role, step)
                if is_linked and after.guard is not None and isinstance(after.data, ast.Name):
                    self.ends[self.twins[after.guard]] = after.data.id

    def _set(self, role: str, *calls: Step | Form | ast.AST | None) -> None:
        for call in calls:
            if call is not None:
                twin = self.twins[getattr(call, "node", call)]
                self.roles.setdefault(twin, role)
                if getattr(call, "callee", call) is None:
                    self.methods.add(twin)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        role = self.roles.get(node)
        if role is None:
            return node
        is_method = node in self.methods or (role == "halves" and not is_torch_chunk(node))
        if is_method:
            node.args = [_name(f"method_{node.func.attr}"), node.func.value, *node.args]
        else:
            node.args = [node.func, *node.args]
        node.func = _name(role)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if role := self.roles.get(node):
            power = [_name("power")] if isinstance(node.op, ast.Pow) else []
            call = ast.Call(_name(role), [*power, node.left, node.right], [])
            return ast.copy_location(call, node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if name := self.ends.get(node):
            value = ast.Call(_name("end"), [ast.Name(name, ast.Load())], [])
            end = ast.Assign([ast.Name(name, ast.Store())], value)
            node.orelse.insert(0, ast.copy_location(end, node.test))
        return node


def _name(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(in_code.NAME, ast.Load()), name, ast.Load())
