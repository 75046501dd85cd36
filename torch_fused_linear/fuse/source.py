"""The text of a function, believed only if compiling its file gives the very code that runs."""

import __future__

import ast
import linecache
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType

from torch.compiler import is_dynamo_compiling

from .runs import Scope, dotted, is_docstring, step_of

# The flags that `from __future__ import` sets in a code object.
FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
# The user's code by the code that replaces it in functions, and by its file.
ORIGINALS: dict[tuple[str, CodeType], CodeType] = {}
# The name, part by part, and the options of what a function calls that does nothing else.
Recipe = tuple[list[str], dict]
_recipes: weakref.WeakKeyDictionary[CodeType, Recipe | None] = weakref.WeakKeyDictionary()


class Unreadable(Exception):
    """Says why the source of a function cannot be had, or believed."""


class Text(Scope):
    """The text of a function, where it is, and what is in it."""

    def __init__(self, function: FunctionType) -> None:
        self.function, code = function, code_of(function)
        name, path = function.__qualname__, code.co_filename
        # linecache knows the cells of notebooks too
        linecache.checkcache(path)
        lines = linecache.getlines(path, function.__globals__)
        if not lines and hasattr(linecache, "_getlines_from_code"):  # of newer Python's terminal
            lines = linecache._getlines_from_code(code)
        if not lines:
            raise Unreadable(
                f"there is no source of {name}, which takes a file or a cell of a notebook; layers "
                "of this package need none"
            )
        self.file = "".join(lines), path, code.co_flags & FUTURE
        try:
            nodes, codes = index(*self.file)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise Unreadable(f"the source of {name} does not compile") from error
        self.key = code.co_name, code.co_firstlineno
        if len(nodes.get(self.key, ())) != 1 or code not in codes:
            raise Unreadable(
                f"the code of {name} is not what is in the file; it was changed since it was "
                "loaded, or made by other code"
            )
        super().__init__(*nodes[self.key], code)
        if getattr(self.node, "type_params", None):
            raise Unreadable(f"{name} has type parameters")
        last = [*self.numbers][-1]  # among the deepest
        if len([*self.around(last)]) > sys.getrecursionlimit() // 5:
            raise Unreadable(f"{name} is nested too deep")


def functions_in(tree: ast.AST) -> dict[tuple[str, int], list[ast.AST]]:
    """All functions, by the name and first line that their code has."""
    found: dict[tuple[str, int], list] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            lines = [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
            found.setdefault((getattr(node, "name", "<lambda>"), min(lines)), []).append(node)
    return found


@contextmanager
def warned_before() -> Iterator[None]:
    """Says nothing of a file that was said when it was imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=32)
@warned_before()
def index(source: str, path: str, flags: int) -> tuple[dict, list[CodeType]]:
    """The functions of a file, and their code."""
    tree = ast.parse(source)
    codes = codes_in(compile(tree, path, "exec", flags, dont_inherit=True))
    return functions_in(tree), codes


def codes_in(code: CodeType) -> list[CodeType]:
    """It and that of all functions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return [code, *(each for constant in inner for each in codes_in(constant))]


def key_of(code: CodeType) -> tuple[str, CodeType]:
    """Equal text has equal code, in whatever file."""
    return code.co_filename, code


def code_of(function: FunctionType) -> CodeType:
    """As the user wrote it."""
    return ORIGINALS.get(key_of(function.__code__), function.__code__)


def unwrapped(function: object) -> FunctionType | None:
    """The function under decorators that tell it (functools.wraps)."""
    while isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def place_of(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


# --- functions that only call an activation, such as ``lambda x: F.relu(x)`` ---------------------


def called_by(function: FunctionType) -> tuple[object, dict]:
    """Returns the one function that a function calls with its argument, and the options of that
    call; None if it does more.
    """
    code = code_of(function)
    if code not in _recipes and not is_dynamo_compiling():
        _recipes[code] = _recipe(function)
    recipe = _recipes.get(code)
    if recipe is None or function.__defaults__ is not None:
        return None, {}
    (name, *attributes), options = recipe
    value = function.__globals__.get(name)
    for attribute in attributes:  # of modules: others may run somebody's code
        value = getattr(value, attribute, None) if isinstance(value, ModuleType) else None
    return (None, {}) if value is function else (value, options)


def _recipe(function: FunctionType) -> Recipe | None:
    try:
        text = Text(function)
    except Unreadable:
        return None
    match text.node:
        case ast.Lambda(body=returned):
            before = []
        case ast.FunctionDef(body=[*before, ast.Return(returned)]):
            pass
        case _:
            return None
    step = step_of(returned)
    if step is None or step.callee is None or len(step.node.args) != 1:
        return None
    path, (options, is_constant) = dotted(step.callee), step.options()
    is_argument = text.code.co_varnames == (getattr(step.data, "id", None),)
    is_global = bool(path) and path[0] in text.code.co_names
    is_known = is_argument and text.code.co_argcount == 1 and is_constant and is_global
    return (path, options) if is_known and all(map(is_docstring, before)) else None
