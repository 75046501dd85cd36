"""Every program of programs.py, fused, gives what it gave, and runs the operators that it names."""

import copy
import io
import pickle

import pytest
import torch
from fused_models import decides, operators, results  # noqa: F401
from programs import PROGRAMS, all_programs
from stacks import assert_same
from tree_compare import attempt
from watching import Calls

import torch_fused_linear as tfl

X = [torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]
FUSED = [name for name, program in PROGRAMS.items() if program.operators]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return all_programs(tmp_path_factory.mktemp("programs"))


def pair(library, name, fused=True, **options):
    """The fused model and a plain one, of one class."""
    torch.manual_seed(0)
    plain = getattr(library, name)().double()
    model = copy.deepcopy(plain)
    if fused:
        model.report = tfl.fuse_(model, **options)
    return model, plain


def without_lone(names):
    """The operators that run where layers are not taken alone."""
    return [name for name in names if name != "linear"]


def assert_runs_the_same(model, plain):
    for training in (True, False):
        for _ in range(2):  # what programs count
            got, want = (results(m.train(training), X) for m in (model, plain))
            assert_same(got, want, f"training: {training}")
    assert model.times == plain.times and model.flag.times == plain.flag.times


@pytest.mark.usefixtures("decides")
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_eager_mode(name, library):
    program, (model, plain) = PROGRAMS[name], pair(library, name)
    report = vars(model).pop("report")
    assert bool(report.fused) is bool(program.operators), report
    assert not program.reason or any(program.reason in s.reason for s in report.skipped), report
    assert type(model) is type(plain)
    assert operators(copy.deepcopy(model).eval(), *X) == program.operators
    assert operators(copy.deepcopy(plain).eval(), *X) == []
    assert_runs_the_same(model, plain)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.load_state_dict(plain.state_dict())
        other.times = plain.times = 0
        other.flag.times = plain.flag.times = 0
        assert_runs_the_same(other, plain)
        tfl.unfuse_(other)
        assert operators(other, *X) == [] and tfl.is_fused(model) is bool(program.operators)


def products(model):
    """torch's own that one call makes."""
    with torch.no_grad(), Calls() as calls:
        model(*X)
    return [name for name in calls.names if name.split("::")[1] in ("linear", "mm", "addmm")]


@pytest.mark.usefixtures("decides")
@pytest.mark.parametrize("name", PROGRAMS)
def test_single_layers_in_eager_mode(name, library):
    model, plain = pair(library, name, linear=True)
    report = vars(model).pop("report")
    found = operators(copy.deepcopy(model).eval(), *X)
    assert without_lone(found) == PROGRAMS[name].operators
    others = [name for name in products(copy.deepcopy(model).eval()) if "fused" not in name]
    reasons = str([s.reason for s in report.skipped])
    assert not others or "more than a tensor" in reasons or "all its local" in reasons, report
    assert_runs_the_same(model, plain)
    assert not tfl.fuse_(model, linear=True).fused
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert operators(copy.deepcopy(other).eval(), *X) == found
    tfl.unfuse_(other)
    assert operators(other, *X) == []


def skip_unless_taken(system, plain):
    """By a copy of the plain program, as some count; in the code as it is written."""
    tfl.unfuse_(plain)
    if isinstance(error := attempt(lambda: system(copy.deepcopy(plain))), Exception):
        pytest.skip(f"the plain one is not taken: {type(error).__name__}")
    torch._dynamo.reset()


def fused_targets(graph):
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("fused.")]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("linear", [False, True], ids=["runs", "single layers"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(name, linear, library):
    if not linear and name not in FUSED:
        pytest.skip("nothing is fused")
    found = []

    def backend(graph, inputs):
        found.append(fused_targets(graph.graph))
        return graph.forward

    def assert_right(model, plain, backend):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(compiled(*X), plain(*X))

    model, plain = (m.eval() for m in pair(library, name, fused=False))
    # Torch's own graphs count wrongly on Python 3.13.
    skip_unless_taken(lambda p: assert_right(p, copy.deepcopy(p), "eager"), plain)
    tfl.fuse_(model, linear=linear)
    assert_right(copy.deepcopy(plain), copy.deepcopy(plain), "eager")  # its code changed, too
    want = operators(copy.deepcopy(model), *X)
    assert_right(model, plain, backend)
    assert found[0] == want and without_lone(want) == PROGRAMS[name].operators


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("linear", [False, True], ids=["runs", "single layers"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_exported(name, linear, library):
    if not linear and name not in FUSED:
        pytest.skip("nothing is fused")
    model, plain = (m.eval() for m in pair(library, name, fused=False))
    skip_unless_taken(lambda p: torch.export.export(p, tuple(X)), plain)
    tfl.fuse_(model, linear=linear)
    want = operators(copy.deepcopy(model), *X)
    exported = torch.export.export(model, tuple(X))
    assert fused_targets(exported.graph) == want
    assert without_lone(want) == PROGRAMS[name].operators
    torch.testing.assert_close(exported.module()(*X), plain(*X))


@pytest.mark.parametrize("name", PROGRAMS)
def test_scripted(name, library):
    model, plain = (m.eval() for m in pair(library, name))
    skip_unless_taken(torch.jit.script, plain)
    vars(model).pop("report")
    scripted, plain = torch.jit.script(model), torch.jit.script(plain)
    for _ in range(3):  # has run, as the executor has changed it
        torch.testing.assert_close(scripted(*X), plain(*X))
    assert "fused::" not in str(scripted.inlined_graph), "it compiles the user's text"
    report = tfl.fuse_script_(scripted)
    assert all(a is b for a, b in zip(scripted.parameters(), model.parameters(), strict=True))
    for training in (True, True, False):  # the executor changes the graph in its first runs
        got, want = (results(m.train(training), X) for m in (scripted, plain))
        assert_same(got, want, f"training: {training}")
    if not PROGRAMS[name].has_other_graph:
        assert bool(report.fused) is bool(PROGRAMS[name].operators), report
        text = str(scripted.inlined_graph)
        for operator in {*PROGRAMS[name].operators} - {"linear_relu", "linear_gelu"}:
            number = PROGRAMS[name].operators.count(operator)
            operator = "linear" if operator == "mlp" else operator  # its last layer
            assert text.count(f"fused::{operator}(") == number, text
        apart = ("fused::linear_relu(", "fused::linear_gelu(")
        number = sum(op in ("mlp", "linear_relu", "linear_gelu") for op in PROGRAMS[name].operators)
        assert sum(map(text.count, apart)) == number, text
    torch.jit.save(scripted, file := io.BytesIO())
    loaded = torch.jit.load(io.BytesIO(file.getvalue()))
    torch.testing.assert_close(loaded(*X), plain(*X))
    graphs = [str(program.inlined_graph) for program in (loaded, scripted)]
    assert graphs[0].count("fused::") == graphs[1].count("fused::")
    model.times = 0  # also counts how often TorchScript asked
    assert operators(model, *X) == PROGRAMS[name].operators, "Python goes on deciding"
