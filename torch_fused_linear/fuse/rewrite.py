"""Puts the calls of call.py into the text of a function, and makes it a function again.

Nothing else changes: the lines, the globals, the closure, the defaults. The text is found by its
name in linecache, so that tracebacks and debuggers show it.
"""

from __future__ import annotations
import __future__

import ast
import dis
import hashlib
import linecache
from functools import partial, reduce
from types import CellType, CodeType, FunctionType
from typing import NamedTuple

import torch

from .. import functional
from . import call, gated
from .products import Product, halved, is_torch_chunk
from .reading import Text, names
from .steps import Run, Step

HELPERS = {
    "call": call.call,
    "begin": call.begin,
    "through": call.through,
    "act": call.activate,
    "act_low": call.activate_low,
    "follow": call.follow,
    "end": call.end,
    "unless": call.unless,
    "method_relu": call.METHODS["relu"],
    "method_relu_": call.METHODS["relu_"],
    "gated": gated.gated,
    "gated_halves": gated.gated_halves,
    "method_chunk": gated.method_chunk,
    "both": gated.both,
    "down": gated.down,
    "value": call.value,
    "partial": partial,
    "is_scripting": torch.jit.is_scripting,
    "run_sequential": call.run_sequential,
    "linear": functional.linear,
    "linear_relu": functional.linear_relu,
    "linear_gelu": functional.linear_gelu,
    "linear_silu": functional.linear_silu,
    "conv2d_relu": functional.conv2d_relu,
    "linear_glu": functional.linear_glu,
    "gated_mlp": functional.gated_mlp,
}
OWN_NAMES = ("co_names", "co_varnames", "co_cellvars", "co_freevars")
FEATURES = (getattr(__future__, name) for name in __future__.all_feature_names)
FUTURE = reduce(int.__or__, (feature.compiler_flag for feature in FEATURES))


class Mark(NamedTuple):
    """Steps of a run that become one call, from a layer to its activation; or a layer alone.

    Attributes:
        run: its number in the function.
        first: the number of the layer's step.
        last: of the activation's; the same for a layer alone.
        low: whether less is kept for the backward.
        script: what TorchScript runs, an operator and its arguments after the parameters; empty
            for the original; None while the model is not scripted.
    """

    run: int
    first: int
    last: int
    low: bool = False
    script: tuple[str, ...] | None = None


class Rewritten(NamedTuple):
    function: FunctionType
    text: str  # of the function alone
    name: str  # of the whole text in linecache


def prefix_of(code: CodeType) -> str:
    """What the helpers' names begin with, so that no name of the function is one of theirs."""
    prefix, used = "fused_", names(code, OWN_NAMES)
    while any(prefix + name in used for name in HELPERS):
        prefix += "_"
    return prefix


def unwrapped(function: object) -> FunctionType | None:
    """The function under decorators that keep it in their closure and nowhere else."""
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        held = [n for n, c in cells(function).items() if c is inner]
        code = dis.get_instructions(function.__code__)
        stored = {i.argval for i in code if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
        if not held or stored & set(held):
            return None
        if not holds_constants(function):
            return None
        function = inner
    is_known = isinstance(function, FunctionType) and holds_constants(function)
    return function if is_known else None


def holds_constants(function: FunctionType) -> bool:
    """Whether a copy of it would not count, or remember, beside it."""
    return all(
        callable(v) or isinstance(v, (bool, str, type(None))) for v in vars(function).values()
    )


def cells(function: FunctionType) -> dict[str, object]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # is filled later
            found[name] = None
    return found


def can_change(text: Text, step: Step) -> bool:
    """Whether the call is written in a way that pieces can be put into."""
    node, cut = step.node, _Cut(text)
    if id(node) in text.in_strings:
        return False
    if isinstance(step, Product):
        signs = [cut.between(form.node.left, form.node.right, to_start=True) for form in step.forms]
        return all(sign.count(b"*") == 1 and b"#" not in sign for sign in signs)
    if step.callee is None:
        method = cut.between(step.data, node).lstrip()
        return method.startswith(b".") and method.count(b")") == 1
    first = node.args[0] if node.args else node.keywords[0]
    return cut.between(node.func, first, to_start=True).lstrip().startswith(b"(")


class _Cut:
    """The text of a function as bytes, which is how the syntax tree counts."""

    def __init__(self, text: Text) -> None:
        self.first = text.start
        lines = [line.encode() for line in text.lines[text.start - 1 : text.node.end_lineno]]
        self.source, self.starts = b"".join(lines), [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node) -> int:
        return self.starts[node.lineno - self.first] + node.col_offset

    def end(self, node) -> int:
        return self.starts[node.end_lineno - self.first] + node.end_col_offset

    def between(self, a, b, to_start: bool = False) -> bytes:
        return self.source[self.end(a) : self.start(b) if to_start else self.end(b)]


class _Edits:
    """Pieces that replace others: (start, end, text), those of an outer call before an inner's."""

    def __init__(self, text: Text) -> None:
        self.cut, self.all = _Cut(text), []
        self.ours = prefix_of(text.function.__code__)
        self.unless = f"{self.ours}unless({text.self_name}, "

    def put(self, start: int, end: int, piece: str) -> None:
        self.all.append((start, end, piece.encode()))

    def call(self, step: Step, helper: str, unless: bool = False) -> None:
        """``f(x)`` becomes ``helper(f, x)``."""
        node, cut = step.node, self.cut
        if step.callee is None:
            self.put(cut.start(node), cut.start(node), f"{helper}({self.called(step)}, ")
            self.put(cut.end(step.data), cut.end(node), ")")
            return
        self.put(cut.start(node), cut.start(node), f"{helper}({self.unless * unless}")
        bracket = cut.source.index(b"(", cut.end(node.func))
        self.put(bracket, bracket + 1, "), " if unless else ", ")

    def end_unless(self, step: Step) -> None:
        """Where the step's condition does not hold, the begun call that waits for it ends."""
        name, end = step.data.id, self.cut.end(step.guard)
        self.put(self.cut.start(step.guard), self.cut.start(step.guard), "(")
        self.put(end, end, f") or not [{name} := {self.ours}end({name})]")

    def spread(self, step: Step) -> None:
        """``f(x)`` becomes ``f, x``."""
        bracket = self.cut.source.index(b"(", self.cut.end(step.node.func))
        self.put(bracket, bracket + 1, ", ")
        self.put(self.cut.end(step.node) - 1, self.cut.end(step.node), "")

    def around(self, step: Step, before: str, after: str) -> None:
        """``f(x)`` becomes ``before x after``."""
        self.peel(step.node, step.data, before, after)

    def peel(self, node: ast.AST, inner: ast.AST, before: str, after: str) -> None:
        """What is around `inner` becomes this, on as many lines."""
        cut = self.cut
        for start, end, piece in (
            (cut.start(node), cut.start(inner), before),
            (cut.end(inner), cut.end(node), after),
        ):
            lines = "\n" * cut.source[start:end].count(b"\n")
            self.put(start, end, piece + lines if piece is before else lines + piece)

    def gated(self, product: Product, mark: Mark, is_begun: bool, refuses: bool) -> None:
        """``act(gate(x)) * up(x)`` becomes ``gated(order, act, gate, up, x, x)``."""
        for form in product.forms:
            layers = [ast.unparse(layer.callee) for layer in form.layers]
            if refuses:
                layers = [f"{self.unless}{layer})" for layer in layers]
            helper, options = "gated", ""
            if form.halves is not None:
                helper, options = "gated_halves", f", {arguments(form.halves)}"
                is_torch = is_torch_chunk(form.halves)
                layers.append("torch.chunk" if is_torch else f"{self.ours}method_chunk")
            given = f"{form.order!r}, {self.called(form.act)}, {', '.join(layers)}, "
            head = f"{self.ours}{helper}({given}"
            options += ", memory='low'" if mark.low else ""
            head = head if is_begun else f"{self.ours}value({head}"
            cut, node = self.cut, form.node
            star = cut.source.index(b"*", cut.end(node.left))
            self.put(cut.start(node), cut.start(node), head)
            self.put(star, star + 1, ",")
            self.put(cut.end(node), cut.end(node), options + (")" if is_begun else "))"))
        self.peel_calls(product)

    def gated_script(self, steps: Run, operator: str, tensors: str) -> None:
        """The same for TorchScript: the operator of the left factor's tensor."""
        product, *others = steps
        for step in others[::-1]:
            self.around(step, "(", ")")
        node = product.node
        cut = self.cut
        star = cut.source.index(b"*", cut.end(node.left))
        self.put(cut.start(node), cut.start(node), f"{self.ours}{operator}(")
        self.put(star, cut.end(node), f"{tensors})")
        self.peel_calls(product)

    def called(self, step: Step) -> str:
        """What is called, with what is given beside the tensor."""
        if step.callee is None:
            return f"{self.ours}method_{step.method}"
        named = [k for k in step.node.keywords if k.arg != "input"]
        if not named:
            return ast.unparse(step.callee)
        given = ", ".join(map(ast.unparse, named))
        return f"{self.ours}partial({ast.unparse(step.callee)}, {given})"

    def peel_calls(self, product: Product) -> None:
        """What the layers and the activation are called with stays in their place."""
        done = set()
        for form in product.forms:
            for step in (form.act, *form.layers):
                if id(step.node) not in done:
                    self.around(step, "(", ")")
            if form.halves is not None and id(form.halves) not in done:
                self.peel(form.halves, halved(form.halves), f"{self.ours}both(", ")")
            done |= {id(call) for call in form.calls}

    def render(self, start: int, end: int) -> bytes:
        pieces, at = [], start
        for a, b, piece in sorted(self.all, key=lambda edit: (edit[0], edit[1] > edit[0])):
            if start <= a and b <= end and a >= at:
                pieces += [self.cut.source[at:a], piece]
                at = b
        return b"".join([*pieces, self.cut.source[at:end]])


def rewrite(text: Text, marks: tuple[Mark, ...], refuses: bool) -> Rewritten:
    """The function with its marked steps as calls of ours.

    Args:
        text: of the function.
        marks: what to change.
        refuses: whether there are layers that are to be called as they are.
    """
    edits, script = _Edits(text), _Edits(text)
    ours, expressions = edits.ours, []
    chosen = sorted(_apart(text, marks), key=lambda m: _order(text.runs[m.run], m))
    if any(mark.script is not None for mark in marks):  # TorchScript compiles no `:=`
        chosen = [m for m in chosen if not any(s.guard for s in text.runs[m.run][: m.last + 1])]
    for mark in chosen:
        steps = text.runs[mark.run][mark.first : mark.last + 1]
        if isinstance(steps[0], Product):
            for step in steps[:0:-1]:
                helper = "down" if step is steps[-1] else "through"
                edits.call(step, ours + helper, refuses and step is steps[-1])
            edits.gated(steps[0], mark, len(steps) > 1, refuses)
            if mark.script:
                script.gated_script(steps, *mark.script)
            expressions += [node for step in steps for node in step.nodes]
            continue
        guarded = next((s for s in steps[1:] if s.guard is not None), None)
        begin = ours + ("begin" if len(steps) > 1 else "follow")
        if guarded is not None:
            edits.end_unless(guarded)
        is_one = len(steps) == 2 and not refuses and is_simple(edits.cut, steps, mark)
        if is_one:
            edits.call(steps[1], f"{ours}call")
            edits.spread(steps[0])
        for step in reversed(steps if not is_one else ()):
            if step is steps[0]:
                edits.call(step, begin, refuses)
            elif step is steps[-1]:
                edits.call(step, ours + ("act_low" if mark.low else "act"))
            else:
                edits.call(step, f"{ours}through")
        if mark.script:
            _script(script, steps, *mark.script)
        expressions += [step.node for step in steps]
    if any(mark.script is not None for mark in marks):
        edits = _both(text, edits, script, expressions)
    return _compile(text, edits)


def is_simple(cut: _Cut, steps: Run, mark: Mark) -> bool:
    """Whether it is ``act(layer(x))`` and no more, neither brackets nor a comma after x."""
    layer, act = steps
    is_nested = act.data is layer.node and act.callee is not None and act.guard is None
    if not is_nested or mark.low or not all(s.node.args and s.is_bare for s in steps):
        return False
    return cut.between(act.node.func, layer.node, to_start=True).count(b"(") == 1 and (
        b"," not in cut.between(layer.data, act.node)
    )


def arguments(halves: ast.Call) -> str:
    """What is given to ``chunk`` beside the tensor."""
    given = [*halves.args[is_torch_chunk(halves) :], *halves.keywords]
    return ", ".join(map(ast.unparse, given))


def _apart(text: Text, marks: tuple[Mark, ...]) -> list[Mark]:
    """The marks without those whose calls are in another: a call may be an activation in one run
    and a layer in the next."""
    taken, kept = set(), []
    for mark in sorted(marks, key=lambda m: (not is_gated(text, m), m.first == m.last)):
        steps = text.runs[mark.run][mark.first : mark.last + 1]
        calls = {id(node) for step in steps for node in step.nodes}
        if not calls & taken:
            kept.append(mark)
            taken |= calls
    return kept


def is_gated(text: Text, mark: Mark) -> bool:
    return isinstance(text.runs[mark.run][mark.first], Product)


def _order(run: Run, mark: Mark) -> tuple[int, int]:
    node = run[mark.last].node
    return node.lineno, node.col_offset, -node.end_lineno, -node.end_col_offset


def _script(edits: _Edits, steps: Run, operator: str, options: str) -> None:
    """What TorchScript gets: the layer's expression is its input, the activation's the operator."""
    layer = ast.unparse(steps[0].callee)
    between = [ast.unparse(step.callee) for step in steps[1:-1]]
    head = "".join(f"{name}(" for name in between[::-1]) + f"{edits.ours}{operator}("
    tail = f", {layer}.weight, {layer}.bias{options})" + ")" * len(between)
    if len(steps) == 1:
        return edits.around(steps[0], head, tail)
    edits.around(steps[-1], head, tail)
    for step in steps[-2::-1]:
        edits.around(step, "(", ")")


def _both(text: Text, edits: _Edits, script: _Edits, nodes: list[ast.AST]) -> _Edits:
    """Of every outermost expression: one text for TorchScript, which compiles no other, and one
    for Python."""
    both, end = _Edits(text), -1
    spans = sorted({(edits.cut.start(n), -edits.cut.end(n)) for n in nodes})
    for start, stop in ((a, -b) for a, b in spans):
        if stop > end:
            one, other = (e.render(start, stop).decode() for e in (script, edits))
            both.put(start, stop, f"({one} if {edits.ours}is_scripting() else {other})")
            end = stop
    return both


def _compile(text: Text, edits: _Edits) -> Rewritten:
    function, source = text.function, edits.render(0, len(edits.cut.source)).decode()
    indented = source[:1].isspace()
    tree = ast.parse("if 1:\n" + source if indented else source)
    node = tree.body[0].body[0] if indented else tree.body[0]
    ast.increment_lineno(tree, text.start - (2 if indented else 1))
    node.decorator_list, node_name = [], node.name
    helpers = {edits.ours + name: helper for name, helper in HELPERS.items()}
    free = [*helpers, *(n for n in function.__code__.co_freevars if n != "__class__")]
    # Names with two underscores are made longer by the class's, less its leading underscores; with
    # more of these it hides no name that the function reads.
    scope = text.class_name and f"___{text.class_name}"
    if scope:
        node = ast.ClassDef(name=scope, bases=[], keywords=[], body=[node], decorator_list=[])
    elif "__class__" in function.__code__.co_freevars:
        free.append("__class__")
    outer = ast.parse("def outer(): pass").body[0]
    outer.args.args, outer.body = [ast.arg(n) for n in free], [node]
    tree = ast.fix_missing_locations(ast.Module([outer], []))
    lines = source.splitlines(keepends=True)
    whole = [*text.lines[: text.start - 1], *lines, *text.lines[text.node.end_lineno :]]
    digest = hashlib.sha256("".join(whole).encode()).hexdigest()[:8]
    name = f"<fused {function.__module__}.{function.__qualname__} {digest}>"
    flags = function.__code__.co_flags & FUTURE
    code = compile(tree, name, "exec", flags=flags, dont_inherit=True)
    levels = ["outer", *([scope] if scope else []), node_name]
    for level in levels:
        code = next(c for c in code.co_consts if getattr(c, "co_name", None) == level)
    if hasattr(code, "co_qualname"):
        code = code.replace(co_qualname=function.__code__.co_qualname)
    linecache.cache[name] = sum(map(len, whole)), None, whole, name
    own = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    closure = tuple(own[n] if n in own else CellType(helpers[n]) for n in code.co_freevars)
    new = FunctionType(code, function.__globals__, function.__name__, None, closure)
    return Rewritten(dressed(new, function), "".join(lines), name)


def generated(text: str, like: FunctionType) -> Rewritten:
    """A function of a text of ours, which calls no others than ours."""
    name = f"<fused {like.__qualname__} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
    scope = {f"fused_{helper}": value for helper, value in HELPERS.items()}
    exec(compile(text, name, "exec", dont_inherit=True), scope)
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    return Rewritten(scope[like.__name__], text, name)


def dressed(new: FunctionType, old: FunctionType) -> FunctionType:
    new.__defaults__, new.__kwdefaults__ = old.__defaults__, old.__kwdefaults__
    new.__module__, new.__qualname__ = old.__module__, old.__qualname__
    new.__doc__, new.__annotations__ = old.__doc__, old.__annotations__
    new.__dict__.update(old.__dict__)
    return new


def wrapped(outer: FunctionType, inner: FunctionType, new: FunctionType) -> FunctionType:
    """The decorated function `outer` with `new` where it had `inner`."""
    if outer is inner:
        return new
    below = wrapped(outer.__wrapped__, inner, new)
    held = cells(outer)
    closure = tuple(
        CellType(below) if held[name] is outer.__wrapped__ else cell
        for name, cell in zip(outer.__code__.co_freevars, outer.__closure__)
    )
    copy = FunctionType(outer.__code__, outer.__globals__, outer.__name__, None, closure)
    copy = dressed(copy, outer)
    copy.__wrapped__ = below
    return copy
