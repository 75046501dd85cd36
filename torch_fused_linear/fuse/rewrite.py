"""Puts other code into functions, in which calls of layers and activations are in_code.py's.

A function stays the same object with its name, file, lines, closure, decorators and attributes; its
code is compiled anew from its tree and the scopes around it. Marks on layers say for which of them
it matters.
"""

from __future__ import annotations

import ast
import copy
import itertools
import sys
import threading
import weakref
from collections.abc import Iterable
from types import CodeType, FunctionType

import torch
from torch import nn

from . import in_code
from .products import Product, is_torch_chunk
from .source import FUNCTIONS, ORIGINALS, Text, codes_in, key_of
from .steps import Step

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
        codes = [(text, _compiled(text, groups)) for text, groups in wanted.items()]
        for text, code in codes:
            text.function.__globals__[in_code.NAME] = in_code
            ORIGINALS.setdefault(text.function, text.code)
            _rewritten[text.function] = wanted[text]
            text.function.__code__ = code
        if codes:
            _forget_compiled()


def put_back() -> None:
    """Gives every function the code that it had."""
    with _lock:
        for function, code in list(ORIGINALS.items()):
            function.__code__ = code
        ORIGINALS.clear()
        _rewritten.clear()
        _forget_compiled()


def _forget_compiled() -> None:
    """Has torch.compile trace anew: it does not look whether functions that it traced through have
    other code."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset_code_caches()


def _compiled(text: Text, groups: Groups) -> CodeType:
    """The function's new code, from a copy of its tree within the classes around it, and all of
    the outermost function."""
    outer = next(k for k, n in enumerate(text.around) if isinstance(n, FUNCTIONS))
    copies: dict[int, ast.AST] = {}
    top = copy.deepcopy(text.around[outer], copies)
    node = copies[id(text.node)]
    _Rewriter(text, groups, copies).visit(node)
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
    """Changes the chosen calls of one function, in a copy of its tree.

    Attributes:
        roles: of calls and products, in_code.py's name for each.
        ends: of an ``if`` whose body takes a begun call, the name that holds it where it is not run.
    """

    def __init__(self, text: Text, groups: Groups, copies: dict[int, ast.AST]) -> None:
        self.copies = copies
        self.roles: dict[ast.AST, str] = {}
        self.ends: dict[ast.AST, str] = {}
        chosen = set(itertools.chain(*groups))
        links = {pair for group in groups for pair in itertools.pairwise(group)}
        runs = [list(zip(run, text.numbers_of(run))) for run in text.runs]
        for step, number in itertools.chain(*runs):
            if isinstance(step, Product) and number in chosen:
                for form in step.forms:
                    self._set("later", form.act.node)
                    self._set("step", *(layer.node for layer in form.layers))
                    self._set("halves", *[form.halves] * (form.halves is not None))
        for run in runs:
            for (step, number), (after, next_number) in zip(run, [*run[1:], (None, None)]):
                is_linked = (number, next_number) in links
                if number in chosen and isinstance(step, Product):
                    role = "product" if is_linked else "last_product"
                    self._set(role, *(form.node for form in step.forms))
                elif number in chosen:
                    self._set("step" if is_linked else "last", step.node)
                if is_linked and after.guard is not None and isinstance(after.data, ast.Name):
                    self.ends[copies[id(text.scope.parents[after.guard])]] = after.data.id

    def _set(self, role: str, *nodes: ast.AST) -> None:
        for node in nodes:
            self.roles.setdefault(self.copies[id(node)], role)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        role = self.roles.get(node)
        if role is None:
            return node
        is_method = isinstance(node.func, ast.Attribute) and (
            role == "halves" and not is_torch_chunk(node) or not (node.args or node.keywords)
        )
        if is_method:
            node.args = [_name(f"method_{node.func.attr}"), node.func.value, *node.args]
        else:
            node.args = [node.func, *node.args]
        node.func = _name(role)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if role := self.roles.get(node):
            return ast.copy_location(ast.Call(_name(role), [node.left, node.right], []), node)
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
