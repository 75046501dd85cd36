"""Programs in which fuse_ has to keep what plain torch does: each is run beside an unfused copy."""

import copy
import dataclasses
import functools
import gc
import inspect
import io
import linecache
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from fused_models import results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear.fuse import plain, source

X = [torch.randn(4, 6, dtype=torch.float64)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
        self.asked = 0

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class ConditionOfWhatTheArgumentTakes(Block):
    def forward(self, x):
        xs, out = [x, x + 1], []
        while xs:
            h = self.fc1(xs.pop())
            if xs:
                h = self.act(h)
            out.append(h)
        return out[0] - out[1]


class ConditionThatTheArgumentChanges(Block):
    def change(self, x):
        self.asked = 1
        return x * 2

    def forward(self, x):
        self.asked = 0
        h = self.fc1(self.change(x))
        if self.asked:
            h = self.act(h)
        return h


class Stateful:
    def __init__(self):
        self.times = 0

    def __bool__(self):
        self.times += 1
        return self.times % 2 == 1


class ConditionThatCounts(Block):
    def __init__(self):
        super().__init__()
        self.flag = Stateful()

    def forward(self, x):
        for _ in range(3):
            h = self.fc1(x)
            if self.flag:
                h = self.act(h)
            x = h + 1
        return x


class ConditionWithElse(Block):
    def forward(self, x):
        for i in range(3):
            h = self.fc1(x)
            n = i % 2
            if n == 0:
                h = self.act(h)
            else:
                h = h - 3
                x = x + 1
            x = h + x
        return x


class InString(Block):
    def forward(self, x):
        shape = f"{tuple(self.act(self.fc1(x)).shape)!r:>{len('12345')}}"
        return self.act(self.fc1(x)) * len(shape)


class Table(Block, dict):
    __hash__ = object.__hash__


def counted(function):
    @functools.wraps(function)
    def wrapper(*args):
        wrapper.calls += 1
        return function(*args)

    wrapper.calls = 0
    return wrapper


class Counted(Block):
    forward = counted(Block.forward)


class Reversed(nn.Sequential):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class ReversedByForward(Reversed):
    def forward(self, x):
        return super().forward(x)


def layers():
    return nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)


PROGRAMS = {  # how many blocks are fused
    ConditionOfWhatTheArgumentTakes: 1,
    ConditionThatTheArgumentChanges: 1,
    ConditionThatCounts: 1,
    ConditionWithElse: 1,
    InString: 2,
    Table: 1,
    Counted: 1,
    lambda: Reversed(*layers()): 0,
    lambda: ReversedByForward(*layers()): 0,
}


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_program_gives_what_it_gave(make):
    model = make().double()
    plain = copy.deepcopy(model)
    assert len(tfl.fuse_(model).fused) == PROGRAMS[make]
    for _ in range(2):
        assert_same(results(model, X), results(plain, X))
    for flag in (vars(m)["flag"] for m in (model, plain) if "flag" in vars(m)):
        assert flag.times % 3 == 0  # asked once each time


def test_a_condition_that_raises_is_seen_as_it_was():
    model = ConditionThatCounts().double()
    tfl.fuse_(model)
    model.flag = torch.ones(2)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value"):
        model(*X)


def test_attributes_of_a_decorated_method_count():
    model = Counted().double()
    tfl.fuse_(model)
    before = Counted.forward.calls
    model(*X)
    assert type(model).forward.calls == Counted.forward.calls == before + 1


def test_modules_that_cannot_be_hashed_are_left_alone():
    @dataclasses.dataclass
    class Unhashable(nn.Module):
        size: int

        def __post_init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(6, 6), nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(x))

    holder = nn.Sequential(Unhashable(6), *layers())  # in which torch's own double() raises
    report = tfl.fuse_(holder)
    assert ("0", "Unhashable cannot be hashed") in [(s.path, s.reason) for s in report.skipped]
    assert len(report.fused) == 1
    assert tfl.is_fused(holder) and not tfl.is_fused(holder[0])
    tfl.unfuse_(holder)
    assert not tfl.is_fused(holder)


@pytest.mark.parametrize("cls", [nn.Dropout, nn.Identity])
def test_a_dropout_that_is_exchanged_for_all_is_seen(cls, monkeypatch):
    model = nn.Sequential(nn.Linear(6, 6), cls(), nn.ReLU(), nn.Linear(6, 6)).double()
    plain = copy.deepcopy(model)
    tfl.fuse_(model)
    monkeypatch.setattr(cls, "forward", lambda self, x: x - 0.25)
    assert_same(results(model, X), results(plain, X))


def test_eager_quantisation_of_fused_pairs():
    from torch.ao import quantization

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant, self.fc, self.act = quantization.QuantStub(), nn.Linear(6, 6), nn.ReLU()
            self.dequant = quantization.DeQuantStub()

        def forward(self, x):
            return self.dequant(self.act(self.fc(self.quant(x))))

    model = Quantised().eval()
    model = quantization.fuse_modules(model, [["fc", "act"]])
    model.qconfig = quantization.get_default_qconfig("qnnpack")
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    tfl.fuse_(model)
    for net in (model, plain):
        quantization.prepare(net, inplace=True)
        net(x)
        quantization.convert(net, inplace=True)
    assert type(model.fc) is type(plain.fc)


def test_autocast_blocks_hold_in_torchscript():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(6, 6), nn.ReLU()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.act(self.fc(x))
            return h

    model = Cast()
    tfl.fuse_(model)
    assert torch.jit.script(model)(torch.randn(4, 6)).dtype == torch.bfloat16


def test_what_is_fused_is_said():
    model = nn.Sequential(Block(), nn.Linear(6, 6))
    assert not tfl.is_fused(model)
    tfl.fuse_(model)
    assert tfl.is_fused(model) and tfl.is_fused(model[0]) and not tfl.is_fused(model[1])
    assert tfl.is_fused(copy.deepcopy(model))
    with pytest.raises(TypeError, match=r"is_fused: expected an nn\.Module, got int"):
        tfl.is_fused(3)


# --- who looks at classes, functions and files --------------------------------------------------


def fused_block():
    model = Block().double()
    plain = copy.deepcopy(model)
    assert len(tfl.fuse_(model).fused) == 1
    return model, plain


def test_classes_and_functions_stay_what_they_are():
    method, source, subclasses = Block.forward, inspect.getsource(Block), Block.__subclasses__()
    before, held = dict(vars(Block)), dict(vars(method))
    model, plain = fused_block()
    assert type(model) is type(plain) is Block and Block.forward is method
    assert vars(Block) == before and vars(method) == held
    assert Block.__subclasses__() == subclasses and inspect.getsource(Block) == source
    assert isinstance(plain, type(model)) and pickle.loads(pickle.dumps(type(model))) is Block
    assert {nn.Linear: 1}.get(type(model.fc1)) == {Block: 1}.get(type(model)) == 1
    values, _ = torch.func.stack_module_state([model, plain])
    assert values["fc1.weight"].shape == (2, 6, 6)
    assert_same(results(model, X), results(plain, X))


def test_of_two_models_of_one_class_one_is_fused():
    model, plain = fused_block()
    for net, found in ((model, ["linear_relu", "linear"]), (plain, [])):
        with tfl.explain() as calls:
            net(*X)
        assert [call.operator for call in calls.calls] == found
    assert not tfl.is_fused(plain)


def test_a_class_that_is_patched_later_runs_the_patch(monkeypatch):
    model, _ = fused_block()
    monkeypatch.setattr(Block, "forward", lambda self, x: x + 41)
    assert torch.equal(model(*X), X[0] + 41)


def test_the_code_is_put_back_with_the_last_mark():
    model, _ = fused_block()
    other, fused = copy.deepcopy(model), Block.forward.__code__
    tfl.unfuse_(model)
    assert Block.forward.__code__ is fused, "the copy has marks"
    with tfl.explain() as calls:
        other(*X)
    assert calls.calls
    for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:
        vars(module).pop(plain.MARK, None)  # those of other tests too
    tfl.unfuse_(other)
    assert Block.forward.__code__ is not fused and not source.ORIGINALS
    assert Block.forward.__code__ == source.Text(Block.forward).code


def test_a_fused_sequential_loads_with_weights_only():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    tfl.fuse_(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    kinds = [nn.Sequential, nn.Linear, nn.ReLU]
    with torch.serialization.safe_globals(kinds):
        again = torch.load(file, weights_only=True)
    x = X[0].float()
    torch.testing.assert_close(again(x), model(x))


PATCHES = [
    *(
        (cls, name)
        for cls in (nn.Linear, nn.ReLU)
        for name in ("forward", "__call__", "_call_impl")
    ),
    *((nn.Module, name) for name in ("__call__", "_call_impl")),
    *((torch.Tensor, "relu"), (F, "relu"), (F, "linear"), (torch, "relu")),
]


class ByMethod(Block):
    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


@pytest.mark.parametrize("owner, name", PATCHES, ids=lambda p: getattr(p, "__name__", p))
@pytest.mark.parametrize("cls", [Block, ByMethod])
def test_functions_that_are_exchanged_later_are_seen(cls, owner, name, monkeypatch):
    model = cls().double()
    plain = copy.deepcopy(model)
    assert tfl.fuse_(model).fused
    original = getattr(owner, name)
    counts = []

    def watching(*args, **kwargs):
        counts.append(1)
        result = original(*args, **kwargs)
        return result * 2 if torch.is_tensor(result) else result

    monkeypatch.setattr(owner, name, watching)
    got = model(*X)
    ours = len(counts)
    assert torch.equal(got, plain(*X)) and len(counts) == 2 * ours
    if ours:
        with tfl.explain() as calls:
            model(*X)
        assert "linear_relu" not in [call.operator for call in calls.calls]


@pytest.mark.parametrize("name", ["forward", "_call_impl"])
@pytest.mark.parametrize("child", ["fc1", "act", "fc2"])
def test_functions_that_are_set_on_an_object_are_seen(child, name):
    model, plain = fused_block()
    for net in (model, plain):
        module = getattr(net, child)
        original = getattr(module, name)
        setattr(module, name, functools.partial(lambda run, x: run(x) * 3, original))
    assert_same(results(model, X), results(plain, X))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_a_normalisation_between_is_said(norm):
    (skipped,) = tfl.fuse_(nn.Sequential(nn.Linear(6, 6), norm(6), nn.ReLU())).skipped
    assert skipped.path == "0" and "a normalisation stands between" in skipped.reason


def test_a_cell_of_a_notebook_is_fused():
    """Notebooks keep the text of a cell in linecache."""
    text = "class Cell(Block):\n    def forward(self, x):\n        return self.act(self.fc1(x))\n"
    name, scope = "<ipython-input-1-c0ffee>", {"Block": Block, "__name__": "__main__"}
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), scope)
    model = scope["Cell"]().double()
    plain = copy.deepcopy(model)
    assert len(tfl.fuse_(model).fused) == 1
    assert_same(results(model, X), results(plain, X))


def test_fusing_while_other_threads_run_the_model():
    model, plain = fused_block()
    tfl.unfuse_(model)
    want, wrong, ends = plain(*X), [], threading.Event()

    def run():
        while not ends.is_set():
            if not torch.allclose(model(*X), want):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        tfl.fuse_(model)
        tfl.unfuse_(model)
    ends.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_compiled_model_is_traced_anew():
    model = Block().double()
    compiled = torch.compile(model, backend="eager")
    for change, found in ((None, False), (tfl.fuse_, True), (tfl.unfuse_, False)):
        if change is not None:
            change(model)
        with tfl.explain() as calls:
            compiled(*X)
        assert bool(calls.calls) is found
    torch._dynamo.reset()
