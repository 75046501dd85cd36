"""Puts other code into functions, in which a run of calls is one call of in_code.py's.

A function stays the same object with its name, file, lines, closure, decorators and attributes; its
code is compiled anew with its file. Marks on layers say for which of them it matters.

Calls that are nested, ``f2(f1(x))``, become ``nested(f2, f1, x)``, which looks everything up in the
same order and calls what is not plain as it was. With ``fuse_(linear=True)`` the call of a layer,
``f(x)``, becomes ``alone(f, x)``. Calls in several statements become ::

    if (result := run(x, f1, f2)) is None:
        h = f1(x)  # as written
        h = f2(h)
    else:
        h = result
        del result

where nothing has run if the result is None.
"""

import ast
import copy
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType

from torch import nn

from . import in_code
from .runs import Form, Region, Step, is_nested, only_names, region_of
from .source import ORIGINALS, Text, code_of, codes_in, functions_in, key_of, warned_before

SEQUENTIAL = nn.Sequential.forward
_SEQUENCE = f"""
if {in_code.NAME}.leads(self):
    return {in_code.NAME}.sequence(self, input)
"""


@dataclass(frozen=True)
class Piece:
    """Steps of a function that become one call."""

    text: Text
    steps: tuple[Step, ...]
    region: Region | None  # None where they are nested

    @classmethod
    def of(cls, text: Text, steps: Iterable[Step]) -> "Piece | None":
        """None where no one call can stand for them."""
        steps = tuple(steps)
        if is_nested(steps):
            return cls(text, steps, None)
        region = region_of(text, steps)
        return None if region is None else cls(text, steps, region)

    @property
    def key(self) -> tuple[int, ...]:
        """The places of the steps in the text: equal for another text of the same function."""
        return tuple(self.text.numbers[step.node] for step in self.steps)

    @property
    def is_alone(self) -> bool:
        """Returns whether it is one layer's call, which becomes ``alone(f, x)``."""
        return len(self.steps) == 1 and self.region is None


Pieces = dict[tuple[int, ...], Piece]
_rewritten: weakref.WeakKeyDictionary[FunctionType, Pieces] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def rewrite(chosen: dict[Text, Pieces], with_sequential: bool) -> None:
    """Puts the code in, beside what is rewritten in the functions already; all is compiled before
    the first function changes."""
    with _lock:
        wanted: dict[Text, Pieces] = {}
        for text, pieces in chosen.items():
            is_ours = key_of(text.function.__code__) in ORIGINALS
            before = _rewritten.get(text.function, {}) if is_ours else {}
            if not pieces.keys() <= before.keys():
                wanted[text] = {**pieces, **before}
        if with_sequential and key_of(SEQUENTIAL.__code__) not in ORIGINALS:
            wanted[Text(SEQUENTIAL)] = {}
        codes = _compiled(wanted)
        for text, code in codes.items():
            text.function.__globals__[in_code.NAME] = in_code
            ORIGINALS[key_of(code)] = text.code
            _rewritten[text.function] = wanted[text]
            text.function.__code__ = code


def holds(piece: Piece) -> bool:
    """Returns whether the function of a piece has it already."""
    function = piece.text.function
    is_ours = key_of(function.__code__) in ORIGINALS
    return is_ours and piece.key in _rewritten.get(function, {})


def put_back() -> None:
    """Gives every function the code that it had, but one that somebody has changed since."""
    with _lock:
        for function in list(_rewritten):
            function.__code__ = code_of(function)
        ORIGINALS.clear()
        _rewritten.clear()


@warned_before()
def _compiled(wanted: dict[Text, Pieces]) -> dict[Text, CodeType]:
    """The new code of each function. Every one is compiled alone, in its file: two of them may
    stand in the same place of it."""
    found = {}
    for text, pieces in wanted.items():
        source, path, flags = text.file
        tree = ast.parse(source)
        (node,) = functions_in(tree)[text.key]
        if text.function is SEQUENTIAL:
            (look,) = ast.parse(_SEQUENCE).body
            line = max(n.lineno for n in ast.walk(node) if isinstance(n, ast.Call))
            node.body.insert(-2, ast.increment_lineno(look, line - 3))  # the loop's
        lone = [piece for piece in pieces.values() if piece.is_alone]
        for piece in lone:  # first, as the others copy what is around them
            _Writer(piece, node).write_alone()
        # A long run is tried first; a shorter one in it stands where the long one is as written.
        runs = [piece for piece in pieces.values() if not piece.is_alone]
        for piece in sorted(runs, key=lambda p: len(p.steps), reverse=True):
            _Writer(piece, node, lone).write()
        ast.fix_missing_locations(tree)
        codes = codes_in(compile(tree, path, "exec", flags, dont_inherit=True))
        found[text] = next(c for c in codes if (c.co_name, c.co_firstlineno) == text.key)
    return found


class _Writer:
    """Writes one piece into a fresh tree of its function."""

    def __init__(self, piece: Piece, node: ast.AST, lone: Sequence[Piece] = ()) -> None:
        self.piece, self.node = piece, node
        self.lone = {number for other in lone for number in other.key}
        if not hasattr(node, "numbered"):  # before anything is changed
            node.numbered = [*ast.walk(node)]
        self.fresh = {old: node.numbered[number] for old, number in piece.text.numbers.items()}

    def write(self) -> None:
        if self.piece.region is None:
            self._nest()
        else:
            self._branch(self.piece.region)

    def write_alone(self) -> None:
        """The node stays the same, so that a run which ends with it finds it."""
        (step,) = self.piece.steps
        _make_alone(self.fresh[step.node])

    def copied(self, node: ast.AST) -> ast.AST:
        return copy.deepcopy(node)

    def _nest(self) -> None:
        steps = self.piece.steps
        called = [self._function(step) for step in reversed(steps)]
        call = ast.Call(_name("nested"), [*called, self.fresh[steps[0].data]], [])
        _exchange(self.node, self.fresh[steps[-1].node], call)

    def _branch(self, region: Region) -> None:
        written = [self.fresh[statement] for statement in region.statements]
        block, at = _found(self.node, written)
        if block is None:  # parts of it are in another branch already
            return
        result = ast.Name(in_code.RESULT, ast.Load())
        last, whole = written[-1], self.fresh[self.piece.steps[-1].node]
        if not any(part is whole for part in ast.walk(last)):  # a shorter piece stands there
            last, whole = region.last, self.piece.steps[-1].node
        holder = ast.Module([self.copied(last)], [])
        parts = [*zip(ast.walk(last), ast.walk(holder.body[0]))]
        _exchange(holder, next(copied for part, copied in parts if part is whole), result)
        for part, copied in parts:  # of the text; the function's own statement has them already
            if self.piece.text.numbers.get(part) in self.lone:
                _make_alone(copied)
        between = [self.copied(s) for s in region.statements[:-1] if only_names(s)]
        forget = ast.Delete([ast.Name(in_code.RESULT, ast.Del())])
        after = [] if isinstance(last, ast.Return) else [forget]
        named = ast.NamedExpr(ast.Name(in_code.RESULT, ast.Store()), self._call())
        test = ast.Compare(named, [ast.Is()], [ast.Constant(None)])
        branch = ast.If(test, written, [*between, *holder.body, *after])
        ast.copy_location(branch, written[0])
        for part in (test, named, forget):
            ast.copy_location(part, region.last)
        block[at : at + len(written)] = [branch]

    def _call(self) -> ast.expr:
        first, *rest = self.piece.steps
        if not first.forms:
            x, functions = self.copied(first.data), [first, *rest]
            return ast.Call(_name("run"), [x, *map(self._function, functions)], [])
        after = [self._function(step) for step in rest]
        calls = [self._of_form(form, after) for form in first.forms]
        if len(calls) == 1:
            return calls[0]
        return ast.IfExp(self.copied(first.node.test), *calls)

    def _of_form(self, form: Form, after: list[ast.expr]) -> ast.expr:
        given = [self.copied(form.steps[1].data), *map(self._function, form.steps)]
        after = [self.copied(f) for f in after]
        if form.halves is None:
            return ast.Call(_name("gated"), [*given, *after], [])
        number, chunk = ast.Constant(form.number), self._chunk(form.halves)
        return ast.Call(_name("halves"), [*given, number, chunk, *after], [])

    def _function(self, step: Step) -> ast.expr:
        """The function of the tensor alone that a step is."""
        if step.callee is None:
            if isinstance(step.node, ast.BinOp) or step.node.func.attr == "pow":
                square = "power" if isinstance(step.node, ast.BinOp) else "method_pow"
                return _applied(_name(square), [ast.Constant(2)], [])
            return _name(f"method_{step.node.func.attr}")
        more = [self.copied(argument) for argument in step.node.args[1:]]
        named = [self.copied(keyword) for keyword in step.node.keywords]
        callee = self.copied(step.callee)
        if more:
            return _applied(callee, more, named)
        return ast.Call(_name("partial"), [callee], named) if named else callee

    def _chunk(self, call: ast.Call) -> ast.expr:
        is_method = getattr(getattr(call.func, "value", None), "id", "") != "torch"
        more = [self.copied(a) for a in (call.args if is_method else call.args[1:])]
        callee = _name("method_chunk") if is_method else self.copied(call.func)
        return _applied(callee, more, [self.copied(k) for k in call.keywords])


def _make_alone(call: ast.Call) -> None:
    call.args.insert(0, call.func)
    call.func = ast.copy_location(_name("alone"), call.func)


def _applied(callee: ast.expr, more: list[ast.expr], named: list[ast.keyword]) -> ast.expr:
    """``partial(applied, callee, (more, ...), {name: value, ...})``"""
    names: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in named]
    options = ast.Dict(names, [keyword.value for keyword in named])
    given = [_name("applied"), callee, ast.Tuple(more, ast.Load()), options]
    return ast.Call(_name("partial"), given, [])


def _blocks(node: ast.AST) -> Iterable[list[ast.AST]]:
    for part in ast.walk(node):
        for _, block in ast.iter_fields(part):
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _found(node: ast.AST, statements: list[ast.AST]) -> tuple[list[ast.AST] | None, int]:
    """The block that holds these statements in a row, and where."""
    wanted = [*map(id, statements)]
    for block in _blocks(node):
        ids = [*map(id, block)]
        if wanted[0] in ids and ids[(at := ids.index(wanted[0])) :][: len(wanted)] == wanted:
            return block, at
    return None, 0


def _exchange(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Puts one expression in the place of another."""
    ast.copy_location(new, old)
    for part in ast.walk(root):
        for name, value in ast.iter_fields(part):
            if value is old:
                setattr(part, name, new)
            elif isinstance(value, list):
                value[:] = [new if each is old else each for each in value]


def _name(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(in_code.NAME, ast.Load()), name, ast.Load())
