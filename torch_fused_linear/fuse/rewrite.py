"""Puts other code into functions, in which calls of layers and activations are in_code.py's.

A function stays the same object with its name, file, lines, closure, decorators and attributes; its
code is compiled anew from its tree and the scopes around it. Marks on layers say for which of them
it matters.
"""

from __future__ import annotations

import ast
import copy
import itertools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType, FunctionType

from torch import nn

from .._torch_internals import forget_compiled
from . import in_code
from .products import Form, Product, is_torch_chunk
from .reading import FUNCTIONS, ORIGINALS, Text, codes_in, key_of
from .steps import Step

SEQUENTIAL = nn.Sequential.forward
_SEQUENCE = f"""
if {in_code.MARK!r} in self.__dict__:
    return {in_code.NAME}.run_sequential(self, input)
"""
_lock = threading.Lock()


@dataclass
class Chosen:
    """The calls of a function that are to be in_code.py's, by their numbers in its text.

    Attributes:
        calls: of all of them.
        links: of each two of which the first may return a begun call to the second.
    """

    calls: set[int] = field(default_factory=set)
    links: set[tuple[int, int]] = field(default_factory=set)

    def add(self, text: Text, steps: Iterable[Step]) -> None:
        """Steps of a run that become one call."""
        before: list[int] = []
        for step in steps:
            numbers = text.numbers_of(step)
            self.calls.update(numbers)
            self.links.update((a, b) for a in before for b in numbers)
            before = numbers

    def has(self, other: Chosen) -> bool:
        return other.calls <= self.calls and other.links <= self.links


_rewritten: weakref.WeakKeyDictionary[FunctionType, Chosen] = weakref.WeakKeyDictionary()


def chosen_in(function: FunctionType) -> Chosen:
    """What has been rewritten in it."""
    return _rewritten.get(function, Chosen())


def is_sequence_rewritten() -> bool:
    return SEQUENTIAL in ORIGINALS


def rewrite(functions: dict[Text, Chosen], with_sequential: bool) -> None:
    """Puts the code in, beside what is rewritten in them already.

    All is compiled before the first function changes.
    """
    with _lock:
        wanted = {}
        for text, chosen in functions.items():
            before = chosen_in(text.function)
            if not before.has(chosen):
                calls, links = before.calls | chosen.calls, before.links | chosen.links
                wanted[text] = Chosen(calls, links)
        if with_sequential and not is_sequence_rewritten():
            wanted[Text(SEQUENTIAL)] = Chosen()
        codes = [(text, _compiled(text, chosen)) for text, chosen in wanted.items()]
        for text, code in codes:
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


def _compiled(text: Text, chosen: Chosen) -> CodeType:
    """The function's new code, from a copy of its tree within the classes around it, and all of
    the outermost function."""
    outer = next(k for k, n in enumerate(text.around) if isinstance(n, FUNCTIONS))
    top = copy.deepcopy(text.around[outer])
    place = next(k for k, n in enumerate(ast.walk(text.around[outer])) if n is text.node)
    node = next(itertools.islice(ast.walk(top), place, None))
    _Rewriter(text, node, chosen).visit(node)
    if text.function is SEQUENTIAL:
        loop = next(k for k, n in enumerate(node.body) if isinstance(n, ast.For))
        (added,) = ast.parse(_SEQUENCE).body
        for part in ast.walk(added):
            ast.copy_location(part, node.body[loop])
        node.body.insert(loop, added)
    for scope in reversed(text.around[:outer]):
        shell = copy.copy(scope)
        shell.bases, shell.keywords, shell.decorator_list, shell.body = [], [], [], [top]
        top = shell
    if isinstance(top, ast.Lambda):
        top = ast.copy_location(ast.Expr(top), top)
    tree = ast.fix_missing_locations(ast.Module([top], []))
    code = compile(tree, text.file, "exec", text.flags, dont_inherit=True)
    return codes_in(code)[key_of(text.node)][0]


class _Rewriter(ast.NodeTransformer):
    """Changes the calls of one function, in a tree of its own."""

    def __init__(self, text: Text, node: ast.AST, chosen: Chosen) -> None:
        fresh = list(ast.walk(node))
        self.twin = {key: fresh[k] for key, k in text.numbers.items()}
        self.text, self.chosen = text, chosen
        self.roles: dict[ast.AST, str] = {}  # in_code.py's name for it
        self.methods: set[ast.AST] = set()  # h.relu()
        self.nested: set[ast.AST] = set()  # act(layer(x)), of which both are simple
        self.ends: dict[ast.AST, str] = {}  # names that hold a begun call where the `if` is not run
        ifs = {id(n.test): n for n in ast.walk(text.node) if isinstance(n, ast.If)}
        for run in text.runs:
            if isinstance(run[0], Product):
                for form in run[0].forms:
                    self._add_form(form)
        for run in text.runs:
            for before, step, after in zip((None, *run), run, (*run[1:], None)):
                self._add(step, before, after)
                is_first = step.guard is not None and isinstance(step.data, ast.Name)
                if is_first and self._is_linked(before, step):
                    self.ends[self.twin[id(ifs[id(step.guard)])]] = step.data.id

    def _is_linked(self, one: Step | None, other: Step | None) -> bool:
        if one is None or other is None:
            return False
        pairs = itertools.product(self.text.numbers_of(one), self.text.numbers_of(other))
        return not self.chosen.links.isdisjoint(pairs)

    def _add_form(self, form: Form) -> None:
        if self.text.numbers[id(form.node)] not in self.chosen.calls:
            return
        self._set(form.act.node, "later", form.act.callee is None)
        for layer in form.layers:
            self._set(layer.node, "step")
        if form.halves is not None:
            self._set(form.halves, "halves")

    def _add(self, step: Step, before: Step | None, after: Step | None) -> None:
        linked = self._is_linked(step, after)
        if isinstance(step, Product):
            for form in step.forms:
                if self.text.numbers[id(form.node)] in self.chosen.calls:
                    self._set(form.node, "product" if linked else "last_product")
            return
        if self.text.numbers[id(step.node)] not in self.chosen.calls:
            return
        self._set(step.node, "step" if linked else "last", step.callee is None)
        is_pair = isinstance(getattr(before, "node", None), ast.Call) and step.data is before.node
        is_simple = is_pair and all(s.is_bare and s.node.args for s in (before, step))
        if is_simple and not linked and step.guard is None and self._is_linked(before, step):
            self.nested.add(self.twin[id(step.node)])

    def _set(self, node: ast.AST, role: str, is_method: bool = False) -> None:
        twin = self.twin[id(node)]
        self.roles.setdefault(twin, role)
        if is_method:
            self.methods.add(twin)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        role = self.roles.get(node)
        if role is None:
            return node
        if role == "halves":
            is_torch = is_torch_chunk(node)
            data = [] if is_torch else [node.func.value]
            node.args = [node.func if is_torch else _name("method_chunk"), *data, *node.args]
        elif node in self.methods:
            node.args = [_name(f"method_{node.func.attr}"), node.func.value]
        elif node in self.nested:
            role, inner = "call", node.args[0]
            node.args = [node.func, *inner.args]
        else:
            node.args = [node.func, *node.args]
        node.func = _name(role)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        role = self.roles.get(node)
        if role is None:
            return node
        made = ast.copy_location(ast.Call(_name("product"), [node.left, node.right], []), node)
        return made if role == "product" else _ended(made)

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if name := self.ends.get(node):
            value = _ended(ast.copy_location(ast.Name(name, ast.Load()), node.test))
            end = ast.Assign([ast.Name(name, ast.Store())], value)
            node.orelse.insert(0, ast.copy_location(end, node.test))
        return node


def _ended(node: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(_name("end"), [node], []), node)


def _name(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(in_code.NAME, ast.Load()), name, ast.Load())
