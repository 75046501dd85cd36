"""fuse_ raises on no model that runs, in whatever forms its functions are held."""

import copy
import functools
import inspect
import sys
import types
from types import FunctionType

import pytest
import tree_compare
from fused_models import results
from programs import HEADER, PROGRAMS, all_programs, module_of
from stacks import assert_same
from test_fuse_programs import X
from torch import nn
from trees import CLASSES, grow

import torch_fused_linear as tfl


def functions_in(cls):
    held = {n: f for n, f in vars(cls).items() if isinstance(f, FunctionType)}
    return {name: f for name, f in held.items() if not name.startswith("__")}


def twin_of(function):
    """Another function of the same code object."""
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__, twin.__dict__ = function.__kwdefaults__, {**vars(function)}
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    return twin


def extended(cls, **held):
    """A child of the class under its name."""
    return type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, **held})


def aliased_in_its_class(cls):
    for name, function in functions_in(cls).items():
        setattr(cls, f"a_{name}", function)
        setattr(cls, f"z_{name}", function)
    return cls


def aliased_in_a_child(cls):
    return extended(cls, **{f"a_{n}": f for n, f in functions_in(cls).items()})


def held_by_another_module(cls):
    found = functions_in(cls)
    other = types.ModuleType("other_module")
    other.Holder = type("Holder", (), {**found, "__module__": "other_module"})
    return extended(cls, holder=other.Holder, **found)


def bound_under_a_second_name(cls):
    for name, function in functions_in(cls).items():
        function.__globals__[f"second_{cls.__name__}_{name}"] = function
        setattr(cls, name, function)
    return cls


def wrapped(cls, keep):
    def around(function):
        def call(*args, **named):
            return function(*args, **named)

        # a generator stays one for whoever asks
        is_plain = not inspect.isgeneratorfunction(function)
        return keep(function)(call) if is_plain else function

    for name, function in functions_in(cls).items():
        setattr(cls, name, around(function))
    return cls


def wrapped_with_wraps(cls):
    return wrapped(cls, functools.wraps)


def wrapped_without_wraps(cls):
    return wrapped(cls, lambda function: lambda call: call)


def twins(cls):
    for name, function in functions_in(cls).items():
        setattr(cls, f"twin_{name}", twin_of(function))
        setattr(cls, name, twin_of(function))
    return cls


FORMS = {
    form.__name__: form
    for form in (
        aliased_in_its_class,
        aliased_in_a_child,
        held_by_another_module,
        bound_under_a_second_name,
        wrapped_with_wraps,
        wrapped_without_wraps,
        twins,
    )
}
SEEDS = 48


def outcomes(model):
    """In training and in eval mode, twice each."""
    return [results(model.train(mode), X) for mode in (True, False) for _ in "ab"]


@pytest.mark.parametrize("form", FORMS)
def test_programs(form, tmp_path):
    library, fused = all_programs(tmp_path), 0
    for name in PROGRAMS:
        cls = FORMS[form](getattr(library, name))
        plain = cls().double()
        model = copy.deepcopy(plain)
        want = outcomes(plain)
        fused += bool(tfl.fuse_(model).fused)
        for got, expected in zip(outcomes(model), want, strict=True):
            assert_same(got, expected, name)
        assert (model.times, model.flag.times) == (plain.times, plain.flag.times), name
        tfl.unfuse_(model)
    # functions under decorators that do not tell them are left alone
    assert fused > len(PROGRAMS) / 3 or form == "wrapped_without_wraps"


@pytest.fixture
def fresh_libraries(monkeypatch):
    """Has the classes of trees made anew, as forms change them."""
    for name in [n for n in sys.modules if n.startswith("tree_library")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n.startswith("tree_library")]:
        del sys.modules[name]


@pytest.mark.usefixtures("fresh_libraries")
@pytest.mark.parametrize("form", FORMS)
def test_generated_models(form, tmp_path):
    libraries, blocks = {}, 0
    for seed in range(SEEDS):
        tree = grow(seed, tmp_path)
        if tree.library not in libraries:
            # beside the module, whose classes name each other
            held = {name: getattr(tree.library, name) for name in dir(tree.library)}
            changed = {f"C{k}": FORMS[form](held[f"C{k}"]) for k in range(CLASSES)}
            libraries[tree.library] = types.SimpleNamespace(**{**held, **changed})
        tree.library = libraries[tree.library]
        if tree.world in ("global names", "global relu"):  # which replace names of the module
            tree.world = None
        try:
            blocks += tree_compare.check(tree, None)
        except Exception as error:
            error.add_note(f"seed {seed}: {tree.describe()}")
            raise
    assert blocks > SEEDS / 4


LAMBDAS = """
from torch import nn
import torch.nn.functional as F

def make(act):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        forward = lambda self, x: self.fc2(act(self.fc1(x)))
        again = forward
    return Inner()

def make_closure(scale):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        def forward(self, x):
            h = self.fc1(x)
            h = F.relu(h)
            return self.fc2(h) * scale
        run = forward
    return Inner()
"""


def test_closures_of_one_text(tmp_path):
    library = module_of(tmp_path / "closures.py", LAMBDAS + HEADER.partition("class")[0])
    made = [library.make_closure(2), library.make_closure(3), library.make(nn.functional.relu)]
    models = [model.double() for model in made]
    want = [outcomes(copy.deepcopy(model)) for model in models]
    both = nn.ModuleList(models)
    assert len(tfl.fuse_(both).fused) >= 2
    for model, expected in zip(models, want, strict=True):
        for got, one in zip(outcomes(model), expected, strict=True):
            assert_same(got, one)
