"""The text that fuse_ makes of a method: believed only if it is the code, and shown as it runs."""

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
from torch_fused_linear.fuse.call import begin

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
        assert type(model).forward is not type(plain).forward
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


def test_the_text_is_shown_and_its_lines_are_the_files(library):
    model = library.Block()
    report = tfl.fuse_(model)
    block = report.fused[0]
    file, _, line = block.place.rpartition(":")
    assert file == library.__file__
    assert "self.fc1(x)" in (library.__file__ and linecache.getline(file, int(line)))
    assert "h = fused_begin(self.fc1, x)  # the first" in block.text
    assert "fused_call(F.gelu, self.__hidden, h)" in block.text
    assert inspect.getsource(model.forward) == block.text
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(4, 5))
    frames = [f for f in traceback.extract_tb(caught.tb) if f.name == "forward"]
    assert frames[0].lineno == int(line) and "fused_begin(self.fc1, x)" in frames[0].line

    seen = []

    class Steps(bdb.Bdb):
        def user_line(self, frame):
            name = frame.f_code.co_filename
            if name.startswith("<fused"):
                seen.append(linecache.getline(name, frame.f_lineno).strip())

    Steps().runcall(model.forward, X)
    assert any("fused_begin(self.fc1, x)" in text for text in seen)


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
    assert "other" not in vars(type(model))
    assert any("is not what is in the file" in s.reason for s in report.skipped)
    assert "forward" in vars(type(model))


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


class Locals(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 6)

    def forward(self, x):
        h = self.fc1(x)
        y = F.relu(h)
        return y + locals()["h"]


REFUSED = {
    AsksForType: "AsksForType.forward asks super() for the parent of type(self)",
    Slots: "Slots has __slots__",
    OfMeta: "the class of OfMeta is made by Meta",
    Locals: "Locals.forward takes all its local names together",
}


@pytest.mark.parametrize("cls", REFUSED)
def test_classes_that_stay_as_they_are(cls):
    model = cls()
    want = model(X)
    report = tfl.fuse_(model)
    assert not report.fused and report.skipped[0].reason.startswith(REFUSED[cls])
    assert report.skipped[0].place.startswith(__file__) and type(model) is cls
    torch.testing.assert_close(model(X), want)


CHILDREN = []


class Registry(ParentOfType):
    def __init_subclass__(cls):
        CHILDREN.append(cls)


def test_no_code_of_the_users_runs_for_the_new_class():
    model = Registry()
    assert tfl.fuse_(model).fused and not CHILDREN


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
import torch_fused_linear as tfl
with tfl.explain() as calls:
    torch.testing.assert_close(model(x), want)
print(len(calls.calls), type(model).__mro__[1].__name__)
tfl.unfuse_(model)
assert type(model).__module__ == "of_a_user" and "forward" in vars(type(model))
torch.testing.assert_close(model(x), want)
"""


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_file_is_loaded_in_a_fresh_process(library, tmp_path, is_edited):
    """Where the code is another there, the plain model is what there is."""
    model = library.Block()
    tfl.fuse_(model)
    torch.save((model, X, model(X).detach()), tmp_path / "all.pt")
    if is_edited:
        text = SOURCE.replace("# the first", "# another").replace("torch.relu(", "F.relu(")
        (tmp_path / "of_a_user.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["0", "Module"] if is_edited else ["3", "Block"])


def test_files_of_the_earlier_mechanism_say_so():
    from torch_fused_linear.fuse import conv1d, swap

    for name in (swap.FusedActivation, conv1d.FusedConv1D):
        text = b"ctorch_fused_linear.fuse.swap\n" + name.__name__.encode() + b"\n)\x81."
        with pytest.raises(RuntimeError, match="call unfuse_ and save it again"):
            pickle.loads(b"\x80\x02" + text)


def test_a_begun_call_is_never_seen():
    """It is what `begin` returns, and nothing that a model computes may be one."""
    assert type(begin(nn.Linear(6, 6), X)) is tuple
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tfl.fuse_(model)
    for end in range(1, 4):
        assert isinstance(model[:end](X), torch.Tensor)
