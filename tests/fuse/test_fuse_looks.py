"""Classes, functions, files and stacks look as they do without fuse_."""

import copy
import importlib
import inspect
import io
import linecache
import pickle
import subprocess
import sys
import threading
import traceback

import pytest
import torch
import torch.nn.functional as F
from fused_models import Block, chain, operators, pair, results, unmark_all
from processes import python
from programs import module_of
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear.fuse.source import ORIGINALS, Text, key_of

SOURCE = '''import torch
import torch.nn.functional as F
from torch import nn

OFFSET = 1.0


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


def test_classes_and_functions_stay_what_they_are():
    method, source, subclasses = Block.forward, inspect.getsource(Block), Block.__subclasses__()
    before, held = dict(vars(Block)), dict(vars(method))
    model, plain = pair(Block, torch.float32)
    assert type(model) is type(plain) is Block and Block.forward is method
    assert vars(Block) == before and vars(method) == held
    assert Block.__subclasses__() == subclasses and inspect.getsource(Block) == source
    assert isinstance(plain, type(model)) and pickle.loads(pickle.dumps(type(model))) is Block
    assert {nn.Linear: 1}.get(type(model.fc1)) == {Block: 1}.get(type(model)) == 1
    assert_same(results(model, [X]), results(plain, [X]))


def test_code_that_is_put_in_afterwards_stays(library):
    others = type("Meta", (type,), {"__hash__": None})("Other", (), {})()  # of a class without one
    model, after = library.Block(), (lambda self, x: x * 100).__code__
    assert tfl.fuse_(model).fused and others
    library.Block.forward.__code__ = after
    tfl.unfuse_(model)
    assert library.Block.forward.__code__ is after


def test_a_class_that_is_patched_before_or_later_runs_the_patch(monkeypatch):
    model, _ = pair(Block, torch.float32)
    monkeypatch.setattr(Block, "forward", lambda self, x: x + 41)
    assert torch.equal(model(X), X + 41)
    assert not tfl.fuse_(Block()).fused
    monkeypatch.undo()
    assert tfl.fuse_(Block()).fused and operators(model, X) == ["mlp"]


def test_the_code_is_put_back_with_the_last_mark(monkeypatch):
    model, _ = pair(Block, torch.float32)
    other, fused = copy.deepcopy(model), Block.forward.__code__
    tfl.unfuse_(model)
    assert Block.forward.__code__ is fused, "the copy has marks"
    assert operators(other, X)
    unmark_all(monkeypatch)
    tfl.unfuse_(other)
    assert Block.forward.__code__ is not fused and not ORIGINALS
    assert Block.forward.__code__ == Text(Block.forward).code


def test_signature_globals_closure_and_class(library, monkeypatch):
    for make in (library.Block, lambda: library.make(2)):
        model = make()
        plain = copy.deepcopy(model)
        assert tfl.fuse_(model).fused
        assert type(model) is type(plain) and key_of(type(model).forward.__code__) in ORIGINALS
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
    file, _, line = tfl.fuse_(model).fused[0].place.rpartition(":")
    assert file == library.__file__ and "self.fc1(x)" in linecache.getline(file, int(line))
    assert inspect.getsource(model.forward) == source and "h = self.fc1(x)  # the first" in source
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(4, 5))
    frames = [f for f in traceback.extract_tb(caught.tb) if f.name == "forward"]
    assert frames[0].lineno == int(line) and "self.fc1(x)" in frames[0].line
    with pytest.raises(RuntimeError) as caught:
        pair(chain, torch.float32)[0](torch.randn(4, 5))
    assert "module(input)" in str([f.line for f in traceback.extract_tb(caught.tb)])


def test_modules_that_cannot_be_hashed_are_left_alone():
    class Unhashable(Block):
        __hash__ = None

    holder = nn.Sequential(Unhashable(), nn.Linear(6, 6), nn.ReLU())
    report = tfl.fuse_(holder)
    assert ("0", "Unhashable cannot be hashed") in [(s.path, s.reason) for s in report.skipped]
    assert len(report.fused) == 1
    assert tfl.is_fused(holder) and not tfl.is_fused(holder[0])
    tfl.unfuse_(holder)
    assert not tfl.is_fused(holder)


class Reversed(nn.Sequential):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class ReversedByForward(Reversed):
    def forward(self, x):
        return super().forward(x)


class Extended(nn.Sequential):
    def forward(self, input):
        return F.relu(self[2](super().forward(input)))


@pytest.mark.parametrize(
    "cls, found",
    [(Reversed, []), (ReversedByForward, []), (Extended, ["mlp", "linear_relu"])],
)
def test_modules_of_other_kinds(cls, found):
    model = cls(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).double()
    plain, x = copy.deepcopy(model), X.double()
    tfl.fuse_(model)
    assert_same(results(model, [x]), results(plain, [x]))
    assert operators(model, x) == found


def test_fusing_while_other_threads_run_the_model():
    model, plain = pair(Block, torch.float32)
    tfl.unfuse_(model)
    want, wrong, ends = plain(X), [], threading.Event()

    def run():
        while not ends.is_set():
            if not torch.allclose(model(X), want):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        tfl.fuse_(model)
        tfl.unfuse_(model)
    ends.set()
    for thread in threads:
        thread.join()
    assert not wrong


# --- text that is the code, and what is not -------------------------------------------------------


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
    codes = library.Block.other.__code__, library.Block.forward.__code__
    assert [key_of(code) in ORIGINALS for code in codes] == [False, True]
    assert any("is not what is in the file" in s.reason for s in report.skipped)


def test_code_of_files_with_equal_text(tmp_path):
    """Such as copies of a library: each gets its own back."""
    paths = [tmp_path / f"copy{k}.py" for k in range(2)]
    models = [module_of(path, SOURCE).Block() for path in paths]
    for change in (tfl.fuse_, tfl.unfuse_):
        for model in models:
            change(model)
        files = [type(model).forward.__code__.co_filename for model in models]
        assert files == [*map(str, paths)]


ASKED = """
class Config:
    times = 0

    @property
    def act(self):
        self.times += 1
        return (F.relu, torch.tanh)[self.times % 2]

config = Config()

def act(x):
    return config.act(x)

class Asked(Block):
    def forward(self, x):
        return act(self.fc1(x))
"""


def test_no_property_is_asked_that_the_code_does_not_ask(tmp_path):
    module = module_of(tmp_path / "asked.py", SOURCE + ASKED)
    model = module.Asked()
    want = [model(X) for _ in range(3)]
    module.config.times = 0
    tfl.fuse_(model)
    torch.testing.assert_close([model(X) for _ in range(3)], want)
    assert module.config.times == 3


DEEP_FORWARD = "class Block(Block):\n    def forward(self, x): return torch.relu(self.fc1(x))"


@pytest.mark.parametrize("begun", ["BIG = 0", DEEP_FORWARD])
def test_expressions_nested_too_deep(begun, tmp_path):
    model = module_of(tmp_path / "deep.py", f"{SOURCE}\n\n{begun}{' + 1' * 900}\n").Block()
    plain, report = copy.deepcopy(model), tfl.fuse_(model)
    torch.testing.assert_close(model(X), plain(X))
    assert begun != DEEP_FORWARD or any("nested too deep" in s.reason for s in report.skipped)


CELL = "class Cell(Block):\n    def forward(self, x):\n        return self.act(self.fc1(x))\n"


def cell(file):
    scope = {"Block": Block, "__name__": "__main__"}
    exec(compile(CELL, file, "exec"), scope)
    return scope["Cell"]()


def test_a_cell_of_a_notebook_is_fused():
    """Notebooks keep the text of a cell in linecache."""
    name = "<ipython-input-1-c0ffee>"
    linecache.cache[name] = len(CELL), None, CELL.splitlines(keepends=True), name
    model = cell(name)
    assert len(tfl.fuse_(model).fused) == 1 and operators(model, X) == ["linear_relu"]


def test_a_class_without_a_file_is_left_alone_with_the_way_out():
    model = cell("<string>")
    (skipped,) = tfl.fuse_(model).skipped
    assert skipped.reason.startswith("there is no source of Cell.forward, which takes a file or a")
    assert type(model).__name__ == "Cell" and not operators(model, X)


SESSION = (
    "from torch import nn\nimport torch, torch_fused_linear as tfl\n"
    "class Cell(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.fc1, self.act = nn.Linear(6, 6), nn.ReLU()\n"
    "    def forward(self, x):\n        return self.act(self.fc1(x))\n\n"
    "report = tfl.fuse_(Cell())\nprint(len(report.fused), report.skipped)\n"
)


def test_a_class_that_is_typed_into_python():
    """From Python 3.13 on it keeps what was typed; before, the reason says what to do."""
    typed = [sys.executable, "-i"]
    said = subprocess.run(typed, input=SESSION, capture_output=True, text=True, check=True).stdout
    is_kept = sys.version_info >= (3, 13)
    expected = "1 ()" if is_kept else "there is no source of Cell.forward, which takes"
    assert expected in said, said


class Carries(Block):
    """Says itself how it is kept."""

    def __getstate__(self):
        return {**super().__getstate__(), "extra": 1}

    def __setstate__(self, state):
        assert state.pop("extra") == 1
        super().__setstate__(state)


@pytest.mark.parametrize("cls", [Block, Carries])
def test_copies_and_pickles(cls):
    model = cls()
    tfl.fuse_(model)
    torch.save(model, buffer := io.BytesIO())
    copies = [copy.copy(model), copy.deepcopy(model)]
    with torch.serialization.safe_globals([cls, nn.Linear, nn.ReLU]):
        for weights_only in (False, True):
            buffer.seek(0)
            copies.append(torch.load(buffer, weights_only=weights_only))
    copies.append(pickle.loads(pickle.dumps(model)))
    for other in copies:
        assert type(other) is cls and type(other.fc1) is nn.Linear
        torch.testing.assert_close(other(X), model(X))
        assert operators(other, X) == ["mlp"]


LOAD = """
import torch, sys
sys.path.insert(0, sys.argv[1])
model, x, want = torch.load(sys.argv[1] + "/all.pt", weights_only=False)
torch.testing.assert_close(model(x), want)
assert not any(name.startswith("torch_fused_linear") for name in sys.modules)
import torch_fused_linear as tfl
for found in (0, 3):
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
    python("-c", LOAD, tmp_path)
