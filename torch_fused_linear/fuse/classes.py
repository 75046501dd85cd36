"""The class that a module gets whose code is rewritten: a child of its own, with the same name."""

from __future__ import annotations

import abc
import ast
import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple

from torch import nn

from .call import run_sequential
from .families import full_name
from .reading import Text, Unreadable
from .rewrite import Mark, Rewritten, generated, rewrite, unwrapped, wrapped

SEQUENTIAL = (nn.Sequential, "forward")
# The class for torch.jit.script of a module; script.py, which imports this file, puts it here.
scripted: Callable[[nn.Module], type] | None = None


class Function(NamedTuple):
    """What changes in a function of a class: the text that the marks are for, and the marks."""

    cls: str
    name: str
    digest: str
    marks: tuple[Mark, ...]


class Config(NamedTuple):
    """What there is to know of a class made here.

    Attributes:
        functions: that are rewritten.
        refused: paths of layers that are to be called as they are.
        low: names of an nn.Sequential's layers that keep less for the backward.
        follows: names of its layers whose input may come from a fused call.
        script: what TorchScript runs in place of nn.Sequential's loop; None for that loop.
    """

    functions: tuple[Function, ...] = ()
    refused: tuple[str, ...] = ()
    low: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    script: str | None = None


class Fused:
    """Beside the rewritten functions, in every class made here."""

    def __reduce_ex__(self, protocol):
        made = type(self)
        reduced = super(made.__fused_base__, self).__reduce_ex__(protocol)
        if isinstance(reduced, str) or made is not made.__fused_base__:
            return reduced
        plain, (function, arguments, *rest) = made.__fused_origin__, reduced
        if getattr(function, "__self__", None) is made:  # a method of the class
            function = getattr(plain, function.__name__)
        function, *arguments = (plain if a is made else a for a in (function, *arguments))
        return rebuild, (plain, made.__fused__, function, tuple(arguments)), *rest

    def __prepare_scriptable__(self):
        before = getattr(super(type(self).__fused_base__, self), "__prepare_scriptable__", None)
        other = self if before is None else before()
        if other is self:
            change_class(self, scripted(self))
        return other


def is_made_here(cls: type) -> bool:
    return "__fused__" in vars(cls)


def origin(cls: type) -> type:
    """The class that it was before."""
    return cls.__fused_origin__ if is_made_here(cls) else cls


def change_class(module: nn.Module, cls: type) -> None:
    object.__setattr__(module, "__class__", cls)


def unfuse_class(module: nn.Module) -> None:
    cls = type(module)
    if is_made_here(cls):
        change_class(module, origin(cls))
    elif any(map(is_made_here, cls.__bases__)):  # sharding or a parametrisation made it
        own = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        change_class(module, _class(cls, tuple(map(origin, cls.__bases__)), own))


def rebuild(cls: type, config: Config, function, arguments: tuple):
    """Used by copy and pickle. Where the source is another by now the module is the plain one."""
    module = function(*arguments)
    if type(module) is cls:
        change_class(module, subclass(cls, config))
    return module


def functions_of(cls: type) -> list[tuple[type, str, FunctionType]]:
    """The methods that run, without those that a child has replaced for good."""
    found: list[tuple[type, str, FunctionType]] = []
    replaced: set[str] = set()
    for base in cls.__mro__:
        if base in (nn.Module, object):
            continue
        for name, value in vars(base).items() if not is_made_here(base) else ():
            if name in replaced:
                continue
            inner = unwrapped(value)
            if inner is not None:
                found.append((base, name, inner))
            if inner is None or "super" not in inner.__code__.co_names:
                replaced.add(name)
    return found


def class_objection(cls: type) -> str | None:
    """Why no child of a class may stand in its place."""
    if type(cls) not in (type, abc.ABCMeta):
        return f"the class of {cls.__name__} is made by {type(cls).__name__}"
    if any(map(is_made_here, cls.__mro__)):
        return "already fused"  # and then put into another class, as sharding does
    if any(vars(base).get("__slots__") for base in cls.__mro__):
        return f"{cls.__name__} has __slots__"
    try:
        _class(cls, (cls,), {})
    except TypeError as error:
        return f"no child of {cls.__name__} can be made: {error}"
    for base, name, function in functions_of(cls):
        known = set(function.__code__.co_names)
        if name == "__init__" or not known & {"type", "__class__"}:
            continue
        try:
            node = Text(function).node
        except Unreadable as error:
            return str(error)
        if asks_for_class(node):
            return f"{base.__name__}.{name} asks for its own class"
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        parents = [c.args[0] for c in calls if getattr(c.func, "id", "") == "super" and c.args]
        if not all(isinstance(parent, ast.Name) for parent in parents):
            return f"{base.__name__}.{name} asks super() for the parent of type(self)"
    return None


def asks_for_class(function: ast.FunctionDef | ast.Lambda) -> bool:
    """Whether it compares ``type(self)`` or ``self.__class__`` with others, or looks it up."""

    def is_own(n: ast.AST) -> bool:
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "type" and len(n.args) == 1:
            return is_self(n.args[0])
        return isinstance(n, ast.Attribute) and n.attr == "__class__" and is_self(n.value)

    def is_self(n: ast.AST) -> bool:
        return getattr(n, "id", None) in first

    # whatever it is called
    first = {a.arg for a in [*function.args.posonlyargs, *function.args.args][:1]}
    for n in ast.walk(function):
        if isinstance(n, ast.Compare) and any(map(is_own, (n.left, *n.comparators))):
            return True
        if isinstance(n, ast.Subscript) and is_own(n.slice):
            return True
    return False


def module_objection(module: nn.Module) -> str | None:
    """Why this module may not get another class."""
    if "parametrizations" in module._modules:
        return f"{type(module).__name__} has a parametrisation"
    if "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own, set on the object"
    return None


_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def subclass(cls: type, config: Config) -> type:
    """The child of `cls` with this rewritten; `cls` itself if there is nothing to rewrite."""
    made = _made.setdefault(cls, weakref.WeakValueDictionary())
    if config not in made:
        made[config] = new = _make(cls, config)
        return new
    return made[config]


def _make(cls: type, config: Config) -> type:
    texts: dict[tuple[type, str], Rewritten] = {}
    functions: dict[type, dict[str, FunctionType]] = {}
    for entry in config.functions:
        for base in cls.__mro__:
            value = vars(base).get(entry.name) if full_name(base) == entry.cls else None
            if value is not None and (new := _rewritten(base, value, entry, config)):
                function, texts[base, entry.name] = new
                functions.setdefault(base, {})[entry.name] = function
    if not functions:
        return cls
    # A parent's rewritten method stands before the parent, so that super() finds it too.
    parents = [_class(base, (base,), own) for base, own in functions.items() if base is not cls]
    parents.sort(key=lambda p: cls.__mro__.index(p.__mro__[1]))
    own = {name: value for name, value in vars(Fused).items() if name.startswith("__p")}
    own |= {"__reduce_ex__": Fused.__reduce_ex__, **functions.get(cls, {})}
    own |= {"__fused__": config, "__fused_origin__": cls, "__fused_texts__": texts}
    made = _class(cls, (cls, *parents), own)
    made.__fused_base__ = made
    return made


def _class(like: type, bases: tuple[type, ...], own: dict) -> type:
    """A class of these bases; no code of theirs runs for it (``__init_subclass__``)."""
    own = {"__module__": like.__module__, "__qualname__": like.__qualname__, **own}
    own["__doc__"] = like.__doc__
    made = type(like).__new__(type(like), like.__name__, (nn.Module,), own)
    made.__bases__ = bases
    return made


def _rewritten(base: type, value, entry: Function, config: Config):
    if (base, entry.name) == SEQUENTIAL:
        if config.script is not None:
            new = generated(config.script, base.forward)
            return new.function, new
        text = inspect.getsource(run_sequential)
        return run_sequential, Rewritten(run_sequential, text, inspect.getfile(run_sequential))
    inner = unwrapped(value)
    try:
        text = Text(inner)
        if text.digest != entry.digest:
            return None
        new = rewrite(text, entry.marks, bool(config.refused))
    except (Unreadable, AttributeError):
        return None
    return wrapped(value, inner, new.function), new
