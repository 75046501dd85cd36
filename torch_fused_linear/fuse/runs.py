"""Reads from the code of a function which calls follow straight upon each other.

``h = self.fc1(x)`` and then ``h = self.act(h)``, or ``self.act(self.fc1(x))``: nobody but ``act``
sees the result of ``fc1``, and nothing that could matter runs in between, so both may be one call.
Such a sequence of calls is a *run*. It may begin with a *product*, a gated layer
``act(gate(x)) * up(x)``, whose calls stand in it or in statements before.
"""

import ast
import itertools
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import NamedTuple

# Functions of h that stand for `h.relu()` and its like, and that Dynamo can trace.
METHODS = {"relu": lambda h: h.relu(), "relu_": lambda h: h.relu_(), "square": lambda h: h.square()}
# Expressions of these alone run no code of the user's, provided that each attribute is stored
# (Resolver.is_stored); operators and comparisons call methods of their operands.
PURE = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Tuple, ast.keyword)
PURE += (ast.expr_context,)
CALLEE = (*PURE, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.Slice)  # layers[i - 1]
WHOLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
GUARDED = ("Try", "TryStar", "With", "AsyncWith")  # which may go on after an exception
LOOPS = (ast.For, ast.AsyncFor, ast.While)
INNER = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
INNER += (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
INNER += (ast.Starred, ast.Dict, ast.JoinedStr)  # some of whose parts are evaluated before
FRAMES = {"f_locals", "_getframe", "currentframe", "breakpoint", "set_trace"}
INNER_FUNCTIONS = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
BRANCHES = (ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Step:
    """A call of one tensor."""

    node: ast.expr
    callee: ast.expr | None  # None for ``h.relu()``, ``h.pow(2)`` and ``h ** 2``
    data: ast.expr  # the tensor
    # Nobody else sees the result of the step before, and nothing that matters runs in between.
    is_sole: bool = True
    # A gated layer is a product; ``a * b if c else d * e`` has two forms.
    forms: "tuple[Form, ...]" = ()

    @property
    def is_bare(self) -> bool:
        """Returns whether the tensor is the only argument."""
        return self.callee is not None and len(self.node.args) + len(self.node.keywords) == 1

    @property
    def is_square(self) -> bool:
        """Returns whether it is written like a square; ``torch.square`` may still be another
        function.
        """
        if isinstance(self.node, ast.BinOp):
            return isinstance(self.node.op, ast.Pow)
        name = getattr(self.node, "func", None)
        return getattr(name, "attr", getattr(name, "id", "")) in ("square", "pow")

    def options(self) -> tuple[dict[str, object], bool]:
        """The constants given by name, and whether every keyword is a constant."""
        keywords = getattr(self.node, "keywords", [])
        known = {k.arg: k.value.value for k in keywords if isinstance(k.value, ast.Constant)}
        return known, len(known) == len(keywords)

    def looked_up(self) -> list[ast.expr]:
        """The expressions that are evaluated for the call, without the tensor."""
        if self.callee is None:
            return []
        return [self.callee, *self.node.args[1:], *(k.value for k in self.node.keywords)]


Run = tuple[Step, ...]


def step_of(node: ast.AST | None) -> Step | None:
    match node:
        case ast.BinOp(data, ast.Pow(), ast.Constant(int(2))):
            return Step(node, None, data)
        case ast.Call(ast.Attribute(data, name), [], []):
            return Step(node, None, data) if name in METHODS else None
        case ast.Call(ast.Attribute(data, "pow"), [ast.Constant(int(2)), *others], keywords):
            return None if others or keywords else Step(node, None, data)
        case ast.Call(callee, [data, *others], keywords):
            is_known = is_callee(callee) and is_pure(*others, *keywords)
            if is_known and not {k.arg for k in keywords} & {None, "input"}:
                return None if isinstance(data, ast.Starred) else Step(node, callee, data)
    return None


def is_callee(node: ast.expr) -> bool:
    """``self.a.b``, ``self.layers[i]``, ``layer`` or ``getattr(self, name)``."""
    if isinstance(node, ast.Call):
        return dotted(node.func) == ["getattr"] and len(node.args) == 2
    is_expected = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    return is_expected and all(isinstance(n, CALLEE) for n in ast.walk(node))


def dotted(node: ast.AST) -> list[str]:
    """``a.b.c`` as its parts; empty if it is not of this kind."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def position(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def is_pure(*nodes: ast.AST) -> bool:
    return all(map(is_pure_part, (n for node in nodes for n in ast.walk(node))))


def is_pure_part(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.operand, ast.Constant)  # ``-1``
    return isinstance(node, (*PURE, ast.unaryop))


def looked_up_in(nodes: Iterable[ast.AST]) -> list[ast.expr]:
    """The attributes and items in expressions, each as a whole."""
    found: list[ast.expr] = []
    for node in nodes:
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            found.append(node)
        else:
            found += looked_up_in(ast.iter_child_nodes(node))
    return found


def names_in(nodes: Iterable[ast.AST], context: type = ast.Load) -> set[str]:
    walked = (n for node in nodes for n in ast.walk(node))
    return {n.id for n in walked if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def mentions(node: ast.AST, name: str) -> list[ast.Name]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]


def assignment(statement: ast.AST) -> tuple[str | None, ast.expr | None]:
    """The name that is assigned, if it is one, and the value."""
    match statement:
        case ast.Assign([ast.Name(name)], value):
            return name, value
        case ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
            return name, value
    return None, None


def only_names(statement: ast.AST) -> bool:
    """Returns whether the statement only gives names to existing values."""
    if not isinstance(statement, ast.Assign):
        return isinstance(statement, ast.Pass) or is_docstring(statement)
    targets = [part for t in statement.targets for part in getattr(t, "elts", [t])]
    is_tuple = isinstance(statement.value, ast.Tuple)
    is_unpacked = any(not isinstance(t, ast.Name) for t in statement.targets)
    are_names = all(isinstance(t, ast.Name) for t in targets)
    return are_names and is_pure(statement.value) and (is_tuple or not is_unpacked)


def is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class Scope:
    """One function, in its syntax tree and as the code that runs."""

    def __init__(self, node: ast.AST, code: CodeType) -> None:
        self.node, self.code = node, code
        self.numbers = {part: number for number, part in enumerate(ast.walk(node))}
        self.parents = {c: p for p in self.numbers for c in ast.iter_child_nodes(p)}
        self.names: dict[str, list[ast.Name]] = defaultdict(list)
        for part in (p for p in self.numbers if isinstance(p, ast.Name)):
            self.names[part.id].append(part)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields the nodes that contain `node`, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement_of(self, node: ast.AST) -> ast.stmt:
        return next(p for p in self.around(node) if isinstance(p, ast.stmt))

    def before(self, statement: ast.AST) -> list[ast.AST]:
        """Lists the statements before this one in its block, the nearest first."""
        for block in vars(self.parents[statement]).values():
            if isinstance(block, list) and statement in block:
                return block[: block.index(statement)][::-1]
        return []

    def origin(self, read: ast.Name) -> ast.AST | None:
        """The last statement of the block that mentions the name before it is read there."""
        before = self.before(self.statement_of(read))
        return next((s for s in before if mentions(s, read.id)), None)

    def may_wait(self, node: ast.expr, origins: Mapping[ast.Name, ast.AST]) -> bool:
        """Returns whether the statements that assign these names may run as late as `node`, which
        reads them.
        """
        if not origins:
            return True
        part = self.statement_of(node)
        before = self.before(part)
        since = before[: max(map(before.index, origins.values()))]
        hidden = {*self.code.co_varnames} - {*self.code.co_cellvars}  # from other functions
        return (
            isinstance(part, WHOLE)
            and self.comes_first(node, part)
            and all(s in origins.values() or only_names(s) for s in since)
            and hidden.issuperset(read.id for read in origins)
        )

    def comes_first(self, node: ast.AST, part: ast.stmt) -> bool:
        """Returns whether the statement `part` only looks values up before `node`, and always
        evaluates `node` once.
        """
        around = list(self.around(node))
        inside = around[: around.index(part)]
        args = [a for p in inside if isinstance(p, ast.Call) for a in p.args]
        # `f(a=node, *late)`, which is gone through before
        late = [a for a in args if isinstance(a, ast.Starred) and position(a) > position(node)]
        is_named = any(isinstance(p, ast.keyword) for p in inside)
        if any(isinstance(p, INNER) for p in inside) or (is_named and late):
            return False
        earlier = self.earlier(node)
        is_double = any(isinstance(n, ast.keyword) and n.arg is None for n in earlier)
        return not is_double and all(map(is_pure_part, earlier))

    def earlier(self, node: ast.AST) -> list[ast.AST]:
        """The parts of its statement that stand before it."""
        own, here = {*ast.walk(node), *self.around(node)}, position(node)
        parts = (n for n in ast.walk(self.statement_of(node)) if hasattr(n, "lineno"))
        return [n for n in parts if n not in own and position(n) < here]

    def takes_locals(self) -> bool:
        """Returns whether the function, or a debugger in it, reads all local names."""
        given = {n.func for n in self.numbers if isinstance(n, ast.Call) and n.args}
        bare = {*self.names["vars"], *self.names["dir"]} - given
        attributes = {n.attr for n in self.numbers if isinstance(n, ast.Attribute)}
        is_taken = any(self.names[name] for name in ("locals", "eval", "exec", *FRAMES))
        return is_taken or bool(bare or attributes & FRAMES)

    def is_read_by(self, name: str, start: ast.AST, reads: Container[ast.Name]) -> bool:
        """Returns whether only these nodes read the value that `start` assigns to `name`."""
        return not any(
            self._reaches(start, n)
            for n in self.names[name]
            if n not in reads
            if not isinstance(n.ctx, ast.Store) or isinstance(self.parents[n], ast.AugAssign)
        )

    def _reaches(self, start: ast.AST, read: ast.Name) -> bool:
        """Returns whether `read` may see the value that the statement `start` assigns. It does not
        if a statement that must run before `read` assigns the same name, unless `start` lies
        between them.
        """
        around = list(self.around(read))
        loops = [p for p in self.around(start) if isinstance(p, LOOPS)]
        is_before = position(read) < (start.end_lineno, start.end_col_offset)
        if is_before and not any(p in loops for p in around):
            return False
        holding = {start, *self.around(start)}
        for inner in around[:-1]:
            before = [] if inner in holding else self.before(inner)
            since = itertools.takewhile(lambda s: s not in holding, before)
            if any(assignment(statement)[0] == read.id for statement in since):
                return False
        return True


# --- one call after another ---------------------------------------------------------------------


def runs_of(scope: Scope) -> list[Run]:
    """Those of a function, but not of functions in it."""
    found: dict[ast.expr, Run] = {}  # by the last call
    for statement in [] if isinstance(scope.node, ast.Lambda) else scope.node.body:
        for run in _runs_in(scope, statement):
            run = _joined(scope, found, run)
            found[run[-1].node] = run
    return list(found.values())


def _runs_in(scope: Scope, node: ast.AST) -> Iterator[Run]:
    """Runs in a statement or part of one, in the order of the text."""
    steps, source = (), node
    while (step := step_of(source)) is not None:  # the innermost is the first
        steps, source = (step, *steps), step.data
    product = product_of(scope, source)
    if product or steps:
        yield (product, *steps) if product else steps
    parts = [source] if steps and not product else ast.iter_child_nodes(source)
    for part in source.body if isinstance(source, BRANCHES) else parts:
        is_inner = isinstance(part, ast.stmt) and isinstance(source, INNER_FUNCTIONS)
        if not is_inner and not isinstance(part, ast.Lambda):
            yield from _runs_in(scope, part)


def _joined(scope: Scope, found: dict[ast.expr, Run], run: Run) -> Run:
    """The run behind the one that gave the name its value which it begins with."""
    read = run[0].data
    start = scope.origin(read) if isinstance(read, ast.Name) else None
    part, (name, value) = scope.statement_of(run[0].node), assignment(start)
    if name is None or value not in found or not isinstance(part, WHOLE):
        return run
    if [n for n in mentions(part, name) if isinstance(n.ctx, ast.Load)] != [read]:
        return run
    is_sole = assignment(part)[0] == name and not (  # it takes the name over
        any(type(p).__name__ in GUARDED for p in scope.around(part))
    )
    if not is_sole:
        is_sole = scope.is_read_by(name, start, {read})
    is_sole = is_sole and scope.may_wait(read, {read: start})
    first, *later = run
    return (*found.pop(value), replace(first, is_sole=is_sole), *later)


# --- gated layers ---------------------------------------------------------------


class Form(NamedTuple):
    """One product of two factors."""

    node: ast.BinOp
    # The activation, the layer before it and the other, or the activation and one for both.
    steps: tuple[Step, ...]
    halves: ast.Call | None  # makes two of that one's result, ``h.chunk(2, -1)``
    number: int  # of the half that is activated
    reads: dict[ast.Name, ast.AST]  # names between the calls, and what gives them their values


def product_of(scope: Scope, node: ast.AST) -> Step | None:
    """A gated layer as the first step of a run."""
    parts = [node]
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse] if is_pure(node.test) else []
    forms = [_form(scope, part) for part in parts]
    if not forms or None in forms:
        return None
    reads = {read: start for form in forms for read, start in form.reads.items()}
    is_sole = all(scope.is_read_by(read.id, start, reads) for read, start in reads.items())
    if not is_sole or not scope.may_wait(node, reads):
        return None
    return Step(node, node, node, forms=tuple(forms))


def _form(scope: Scope, node: ast.AST | None) -> Form | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for activated, other in ((node.left, node.right), (node.right, node.left)):
        reads: dict[ast.Name, ast.AST] = {}
        value, half = _origin(scope, activated, reads)
        act = step_of(value) if half is None else None
        if act is None or act.is_square or len(act.node.args) != (act.callee is not None):
            continue
        value, half = _origin(scope, act.data, reads)
        rest, other_half = _origin(scope, other, reads)
        if half is None and other_half is None:
            gate, up = _bare_step(value), _bare_step(rest)
            is_one = gate and up and ast.dump(gate.data) == ast.dump(up.data)
            if is_one and isinstance(gate.data, ast.Name):
                return Form(node, (act, gate, up), None, 0, reads)
        elif value is rest and {half, other_half} == {0, 1} and (data := halved(value)):
            layer, part = _origin(scope, data, reads)
            gate = _bare_step(layer) if part is None else None
            if gate is not None:
                return Form(node, (act, gate), value, half, reads)
    return None


def _bare_step(node: ast.AST | None) -> Step | None:
    """A call of a tensor that is given by position, and of nothing else."""
    step = step_of(node)
    return step if step is not None and step.is_bare and step.node.args else None


def halved(node: ast.AST | None) -> ast.expr | None:
    """The tensor of ``h.chunk(2, dim=-1)`` or ``torch.chunk(h, 2, dim=-1)``."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("torch"), "chunk"), [data, *given], names) | ast.Call(
            ast.Attribute(data, "chunk"), given, names
        ) if is_pure(*given, *names):
            return data
    return None


def _origin(scope: Scope, node: ast.expr, reads: dict) -> tuple[ast.expr | None, int | None]:
    """Returns the expression that a name stands for, and which of the two values that it unpacks;
    any other expression unchanged.
    """
    if not isinstance(node, ast.Name):
        return node, None
    start = scope.origin(node)
    reads[node] = start
    match start:
        case ast.Assign([ast.Name(node.id)], value):
            return value, None
        case ast.Assign([ast.expr(elts=[ast.Name(one), ast.Name(two)])], value):
            is_half = one != two and node.id in (one, two)
            return (value, [one, two].index(node.id)) if is_half else (None, None)
    return None, None


# --- statements that become one call ------------------------------------------------------------


class Region(NamedTuple):
    """Statements of one block whose calls become one, if all that is called is plain.

    The first step is called with a name, which is read before the first statement runs; so is all
    that the steps look up.
    """

    statements: tuple[ast.stmt, ...]
    looked_up: tuple[ast.expr, ...]  # attributes and items, which must be stored

    @property
    def last(self) -> ast.stmt:
        return self.statements[-1]


def is_nested(steps: Run) -> bool:
    """Returns whether each call is an argument of the next: all is looked up before the first."""
    are_nested = all(after.data is step.node for step, after in itertools.pairwise(steps))
    if steps[0].forms:
        return False
    given = [value for step in steps for value in step.looked_up()[1:]]
    return are_nested and not looked_up_in(given)


def region_of(scope: Scope, steps: Run) -> Region | None:
    """The statements that the steps are in; None where one call cannot stand for them."""
    first, last = steps[0], scope.statement_of(steps[-1].node)
    calls = [step for form in first.forms for step in form.steps] or [first]
    layers = [step for form in first.forms for step in form.steps[1:]] or [first]
    statements = _statements(scope, first, last)
    if not isinstance(last, WHOLE) or not scope.comes_first(steps[-1].node, last):
        return None
    if statements is None or not all(isinstance(step.data, ast.Name) for step in layers):
        return None
    given = [e for step in (*calls, *steps[bool(first.forms) :]) for e in step.looked_up()]
    given += [c for form in first.forms if form.halves for c in _arguments(form.halves)]
    if isinstance(first.node, ast.IfExp):
        given.append(first.node.test)
    if names_in(given) & names_in(statements[:-1], ast.Store):
        return None
    # The two layers of a gate read one input, which no statement between the reads may exchange.
    reads = [statements.index(scope.statement_of(step.node)) for step in layers]
    names = {step.data.id for step in layers}
    if names & names_in(statements[min(reads) : max(reads)], ast.Store):
        return None
    between = [s.value for s in statements[:-1] if only_names(s) and isinstance(s, ast.Assign)]
    return Region(statements, (*looked_up_in([*given, *between, *scope.earlier(steps[-1].node)]),))


def _statements(scope: Scope, first: Step, last: ast.stmt) -> tuple[ast.stmt, ...] | None:
    """From that of the first call to the last one."""
    starts = [start for form in first.forms for start in form.reads.values()]
    starts = starts or [scope.statement_of(first.node)]
    before = [last, *scope.before(last)] if last in scope.parents else []
    if any(start not in before for start in starts):
        return None
    return tuple(before[: 1 + max(map(before.index, starts))][::-1])


def _arguments(call: ast.Call) -> list[ast.expr]:
    """Lists the expressions that a call of ``chunk`` evaluates beside the tensor."""
    is_method = getattr(getattr(call.func, "value", None), "id", "") != "torch"
    given = call.args if is_method else [call.func, *call.args[1:]]
    return [*given, *(k.value for k in call.keywords)]
