"""The code that fuse_ gives a function: from text that is the code, with all else as it was."""

import bdb
import copy
import importlib
import inspect
import io
import linecache
import pickle
import subprocess
import sys
import traceback

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear.fuse import in_code
from torch_fused_linear.fuse.source import ORIGINALS

SOURCE = '''import torch
import torch.nn.functional as F
from torch import nn

OFFSET = 1.0


def kept(function):
    """A decorator without functools.wraps."""
    def inner(*args):
        return function(*args)
    return inner


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.__hidden = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, scale: float = 2.0, *, more=OFFSET):
        """What it does, über alles."""
        text = "ü"; h = self.fc1(x)  # the first
        h = F.relu(  # over
            h,
        )
        return F.gelu(self.__hidden(h)) * scale + more + OFFSET + len(text) * (
            self.other(x)
        )

    def other(self, x):
        return torch.relu(self.fc1(x)).sum()


def make(power):
    class Closure(Block):
        def forward(self, x):
            return F.relu(self.fc1(super().forward(x))) ** power

        def change(self, to):
            nonlocal power
            power = to

    return Closure()
'''
X = torch.randn(4, 6)


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "of_a_user.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    yield importlib.import_module("of_a_user")
    sys.modules.pop("of_a_user", None)


def test_signature_globals_closure_and_class(library, monkeypatch):
    for make in (library.Block, lambda: library.make(2)):
        model = make()
        plain = copy.deepcopy(model)
        assert tfl.fuse_(model).fused
        assert type(model) is type(plain) and type(model).forward in ORIGINALS
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        assert model.forward.__doc__ == plain.forward.__doc__
        assert type(model).forward.__globals__ is vars(library)
        torch.testing.assert_close(model(X), plain(X))
        monkeypatch.setattr(library, "OFFSET", 5.0)
        torch.testing.assert_close(model(X), plain(X))
    plain.change(3)  # the cell is one
    torch.testing.assert_close(model(X), plain(X))
    monkeypatch.setattr(library, "F", torch)
    with pytest.raises(AttributeError, match="gelu"):
        model(X)


def test_the_lines_that_are_shown_are_the_users(library):
    model = library.Block()
    source = inspect.getsource(model.forward)
    block = tfl.fuse_(model).fused[0]
    file, _, line = block.place.rpartition(":")
    assert file == library.__file__ and "self.fc1(x)" in linecache.getline(file, int(line))
    assert inspect.getsource(model.forward) == source and "h = self.fc1(x)  # the first" in source
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(4, 5))
    frames = [f for f in traceback.extract_tb(caught.tb) if f.name == "forward"]
    assert frames[0].lineno == int(line) and "self.fc1(x)" in frames[0].line

    seen = []

    class Steps(bdb.Bdb):
        def user_line(self, frame):
            name = frame.f_code.co_filename
            seen.append(linecache.getline(name, frame.f_lineno).strip())

    Steps().runcall(model.forward, X)
    assert any("self.fc1(x)" in text for text in seen)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_file_that_was_edited_is_not_believed(library, is_known):
    path = library.__file__
    if is_known:
        linecache.getlines(path)
    edited = SOURCE.replace("torch.relu(self.fc1(x)).sum()", "torch.relu(self.fc1(x)).mean()")
    with open(path, "w") as file:
        file.write(edited + "# and longer\n")
    model = library.Block()
    plain = copy.deepcopy(model)
    report = tfl.fuse_(model)  # what was not edited may be
    torch.testing.assert_close(model(X), plain(X))
    assert library.Block.other not in ORIGINALS and library.Block.forward in ORIGINALS
    assert any("is not what is in the file" in s.reason for s in report.skipped)


def test_code_without_a_file():
    scope = {}
    exec(SOURCE.replace("nn.Module", "nn.Module, metaclass=type"), scope)
    model = scope["Block"]()
    (skipped,) = tfl.fuse_(model).skipped
    assert skipped.reason.startswith("there is no source of")
    assert type(model) is scope["Block"]


class ParentOfType(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 6)

    def forward(self, x):
        return F.relu(self.fc1(x))


class AsksForType(ParentOfType):
    def forward(self, x):
        return super(type(self), self).forward(x)


class Slots(ParentOfType):
    __slots__ = ("slot",)


class Meta(type):
    pass


class OfMeta(ParentOfType, metaclass=Meta):
    pass


CHILDREN = []


class Registry(ParentOfType):
    def __init_subclass__(cls):
        CHILDREN.append(cls)


@pytest.mark.parametrize("cls", [AsksForType, Slots, OfMeta, Registry])
def test_classes_stay_whatever_they_are(cls):
    model = cls()
    want = model(X)
    assert tfl.fuse_(model).fused and type(model) is cls and not CHILDREN
    with tfl.explain() as calls:
        torch.testing.assert_close(model(X), want)
    assert [call.operator for call in calls.calls] == ["linear_relu"]


class Locals(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 6)

    def forward(self, x):
        h = self.fc1(x)
        y = F.relu(h)
        return y + locals()["h"]


def test_a_function_that_takes_all_its_names_is_left_alone():
    model = Locals()
    want = model(X)
    (skipped,) = tfl.fuse_(model).skipped
    assert skipped.reason == "Locals.forward takes all its local names together"
    assert skipped.place.startswith(__file__)
    torch.testing.assert_close(model(X), want)


class Carries(ParentOfType):
    """Says itself how it is kept."""

    def __getstate__(self):
        return {**super().__getstate__(), "extra": 1}

    def __setstate__(self, state):
        assert state.pop("extra") == 1
        super().__setstate__(state)


class Reduced(ParentOfType):
    def __reduce__(self):
        return type(self), (), self.__dict__


class ReducedByMethod(ParentOfType):
    @classmethod
    def made(cls):
        return cls()

    def __reduce__(self):
        return type(self).made, (), self.__dict__


@pytest.mark.parametrize("cls", [ParentOfType, Carries, Reduced, ReducedByMethod])
def test_copies_and_pickles(cls):
    model = cls()
    tfl.fuse_(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(model, protocol))
        assert type(again) is type(model)
    for other in (copy.copy(model), copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(other) is type(model) and type(other.fc1) is nn.Linear
        torch.testing.assert_close(other(X), model(X))


LOAD = """
import torch, sys
sys.path.insert(0, sys.argv[1])
model, x, want = torch.load(sys.argv[1] + "/all.pt", weights_only=False)
torch.testing.assert_close(model(x), want)
assert not any(name.startswith("torch_fused_linear") for name in sys.modules)
import torch_fused_linear as tfl
for found in (0, int(sys.argv[2])):
    with tfl.explain() as calls:
        torch.testing.assert_close(model(x), want)
    assert len(calls.calls) == found, (len(calls.calls), found)
    report = tfl.fuse_(model)
tfl.unfuse_(model)
torch.testing.assert_close(model(x), want)
"""


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_file_is_loaded_in_a_fresh_process(library, tmp_path, is_edited):
    """Without this package, and with it, where the code may be another."""
    model = library.Block()
    tfl.fuse_(model)
    torch.save((model, X, model(X).detach()), tmp_path / "all.pt")
    if is_edited:
        text = SOURCE.replace("# the first", "# another").replace("torch.relu(", "F.relu(")
        (tmp_path / "of_a_user.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), "3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_begun_call_is_never_seen():
    """It is what `step` returns, and nothing that a model computes may be one."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tfl.fuse_(model)
    assert type(in_code.step(model[0], X)) is tuple
    for end in range(1, 4):
        assert isinstance(model[:end](X), torch.Tensor)
