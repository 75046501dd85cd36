"""Which parts of an nn.Sequential the code of the module that holds it calls."""

import ast
from collections.abc import Iterator

from .source import Text

ITERATORS = {"enumerate", "reversed", "zip", "list", "tuple", "iter"}
CHILDREN = {"children", "modules", "values", "named_children", "items", "named_modules"}

Bounds = tuple[int | None, int | None, int | None]
WHOLE: Bounds = None, None, None


def parts_called(name: str, text: Text) -> Iterator[Bounds | None]:
    """Yields the bounds of each slice of ``self.name`` that a method calls, and ``WHOLE`` for a use
    that may call all of it. None stands for a use that takes single layers."""
    arguments = text.node.args
    (first, *_) = [*arguments.posonlyargs, *arguments.args, ast.arg("")]
    parents = {part: node for node in ast.walk(text.node) for part in ast.iter_child_nodes(node)}
    for node in parents:
        match node:
            case ast.Attribute(ast.Name(first.arg), attribute) if attribute == name:
                yield _part_called(node, parents)


def _part_called(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Bounds | None:
    above = parents[node]
    part = WHOLE
    if isinstance(above, ast.Subscript) and above.value is node:
        if not isinstance(above.slice, ast.Slice):
            return None
        part = bounds_of(above.slice) or WHOLE
        node, above = above, parents[above]
        if isinstance(above, ast.Call) and above.func is node:
            return part
    while True:
        match above:
            case ast.Call(ast.Name("len")):
                return None
            case ast.For(iter=each) | ast.comprehension(iter=each) if each is node:
                return None
            case ast.Call(ast.Name(called)) if called in ITERATORS:
                pass
            case ast.Attribute(attr=method) if method in CHILDREN:
                pass
            case ast.Call(ast.Attribute(attr=method)) if method in CHILDREN:
                pass
            case _:
                return WHOLE
        node, above = above, parents[above]


def bounds_of(index: ast.Slice) -> Bounds | None:
    """The three numbers of a slice; None where one is no constant."""
    found = []
    for part in (index.lower, index.upper, index.step):
        try:
            found.append(None if part is None else ast.literal_eval(part))
        except ValueError:
            return None
    is_known = all(bound is None or type(bound) is int for bound in found) and found[2] != 0
    return (found[0], found[1], found[2]) if is_known else None
