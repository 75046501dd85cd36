"""The same code written in another way: more brackets and commas, and names that fuse_ uses too."""

from __future__ import annotations

import ast
import random
import re

LOCALS = ("fused_call", "fused_begin", "fused_through", "fused_act", "fused_linear_relu")
EXPRESSIONS = (ast.Call, ast.Name, ast.Attribute, ast.BinOp)


def written_otherwise(rng: random.Random, text: str) -> str:
    if rng.random() < 0.5:
        text = text.replace("bare_relu", "fused_begin")
    names = sorted(set(re.findall(r"\b[hyzuv]\d+\b", text)))
    if names and rng.random() < 0.3 and "fused_begin" not in text:
        text = re.sub(rf"\b{rng.choice(names)}\b", rng.choice(LOCALS), text)
    if rng.random() < 0.4:
        return text
    source = text.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    pieces = []
    for node in expressions(ast.parse(text)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.Call) and (given := [*node.args, *node.keywords]):
            last = max(starts[a.end_lineno - 1] + a.end_col_offset for a in given)
            is_alone = isinstance(given[-1], ast.GeneratorExp)
            if not is_alone and b"," not in source[last:end] and rng.random() < 0.1:
                pieces.append((end - 1, 1, b","))
        if rng.random() < 0.06:
            pieces += [(start, 2, b"("), (end, 0, b")")]
    for at, _, piece in sorted(pieces, reverse=True):
        source = source[:at] + piece + source[at:]
    return source.decode()


def expressions(node: ast.AST):
    """Those that brackets may be put around; within a formatted string no place is known."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, EXPRESSIONS) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list", "bases"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield from expressions(part)
