"""The fuzz in short, and that it reports what is wrong."""

import math

import operators
import pytest
import torch
from helpers import one_thread  # noqa: F401
from processes import starting_with

from certify import fuzz, fuzz_cases, record

CASES = 800


def tried(units, device="cpu"):
    trial, found = fuzz.Trial(device, measured=False), {}
    for unit in units:
        record.add(found, {"failures": [], **trial.one(1, unit)})
    return found


def test_random_cases_are_as_exact_as_eager(device):
    found = tried(range(CASES), device.type)
    assert found["failures"] == fuzz.Trial.verdict(found) == []
    counts = [c["cases"] for dtypes in found["by"].values() for c in dtypes.values()]
    assert sum(counts) > 0.99 * CASES
    assert set(found["operators"]) == {*fuzz_cases.OPERATORS, "conv2d_relu"}


def test_a_case_is_the_same_again():
    for unit in range(40):
        first, again = (fuzz_cases.Draw(3, unit, "cpu").case() for _ in range(2))
        assert str(first) == str(again)
        assert all(
            torch.equal(a, b) or not first.is_finite
            for a, b in zip([*first.tensors, first.grad], [*again.tensors, again.grad])
        )


def test_cases_differ_in_all_that_is_promised():
    cases = [fuzz_cases.Draw(1, unit, "cpu").case() for unit in range(1000)]
    layers = [layer for case in cases for layer in case.layers]
    assert {case.x.dtype for case in cases} == set(fuzz_cases.DTYPES)
    assert {case.policy for case in cases} == {"auto", "cublaslt", "eager"}
    assert {case.mode for case in cases} == {"grad", "no_grad", "inference_mode"}
    chains = [repr(layer.op) for layer in layers if layer.op.name == "mlp"]
    assert {name.split()[-1] for name in chains} == {"default", "low"}
    assert {0, 1} <= {size for case in cases for size in case.x.shape}
    assert max(len(case.layers) for case in cases) == 3
    assert any(0 in t.stride() for case in cases for t in case.tensors if t.numel() > 1)
    assert any(t.storage_offset() for case in cases for t in case.tensors)
    assert any(not all(case.wanted) for case in cases) and any(not c.is_finite for c in cases)


def planted(monkeypatch, change):
    """`change(result, x, layer)` is what a linear layer then gives."""
    # eager, in processes of its own, has nothing planted and would be asked for each failure
    monkeypatch.setattr(fuzz, "eager_reads_unwritten", lambda seed, unit: False)
    right = fuzz_cases.one_of_ours

    def ours(x, layer, through_ops):
        y = right(x, layer, through_ops)
        return change(y, x, layer) if layer.op.name == "linear" else y

    monkeypatch.setattr(fuzz_cases, "one_of_ours", ours)


class Backward(torch.autograd.Function):
    """The identity, whose gradient is half as much again."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, g: g * 1.5)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda y, x, layer: y * 1.5, "wrong: error"),
        (lambda y, x, layer: y / 0.0, "not finite where eager's is"),
        (lambda y, x, layer: y.double(), "is torch.float64"),
        (lambda y, x, layer: Backward.apply(y), "grad_input: wrong"),
        (lambda y, x, layer: y.no_such_method(), "AttributeError"),
    ],
    ids=["wrong", "not finite", "dtype", "gradient", "error"],
)
def test_a_wrong_operator_is_reported(monkeypatch, change, words):
    planted(monkeypatch, change)
    found = tried(range(100))
    assert any(words in text for text in found["failures"]), found["failures"][:5]


def test_wrong_results_of_eager_are_counted_apart(monkeypatch):
    """Torch's convolution on a CPU is, in some layouts."""
    of_eager = fuzz.of_eager
    garbage = lambda case: ([t * 1e30 for t in of_eager(case)[0]], False)  # noqa: E731
    monkeypatch.setattr(fuzz, "of_eager", garbage)
    monkeypatch.setattr(fuzz, "eager_reads_unwritten", lambda seed, unit: False)
    found = tried(range(60))
    assert found["results of eager that are wrong"] > 60
    pooled = [c["results"] for dtypes in found["by"].values() for c in dtypes.values()]
    assert all(s["eager"] < 1e30 * (1 + s["elements"]) for r in pooled for s in r.values())


@pytest.mark.parametrize("is_systematic", [True, False])
@pytest.mark.parametrize("roundings", [10, 1000])
def test_sums_of_equal_terms_may_err_by_a_rounding_each(monkeypatch, is_systematic, roundings):
    x, weight = torch.full((3, 100), 0.1).double(), torch.full((5, 100), 0.3).double()
    words = "x same_everywhere, weight same_columns" if is_systematic else ""
    layers = [fuzz_cases.Layer(operators.LINEAR, [weight, None])]
    flags = {"policy": "auto", "through_ops": False, "deterministic": False}
    case = fuzz_cases.Case(
        x, layers, x[:, :5], [False] * 2, "no_grad", calls_backward=False, words=words, **flags
    )
    error = roundings * torch.finfo(torch.float64).eps
    planted(monkeypatch, lambda y, x, layer: y * (1 + error))
    found = fuzz.judged(case)
    assert (found["failures"] == []) == (is_systematic and roundings < 100)
    assert bool(found["by"]["auto"]["float64"]["results"]) != is_systematic


def test_at_the_largest_number_infinity_is_as_right():
    largest, infinity = 65504.0, math.inf
    mine = torch.tensor([infinity, largest, infinity, infinity, largest, infinity]).half()
    theirs = torch.tensor([largest, infinity, infinity, largest, largest, 1.0]).half()
    exact = torch.tensor([65517.0, 66301.0, 66301.0, 60000.0, 65517.0, 1.0]).double()
    either = fuzz.either_is_right(mine, theirs, exact, exact.abs() * 8)
    assert either.tolist() == [True, True, False, False, False, False]


def test_reading_unwritten_memory_is_found(monkeypatch):
    case = next(c for k in range(50) for c in [fuzz_cases.Draw(1, k, "cpu").case()] if c.is_finite)
    assert not fuzz.eager_differs(case)
    sizes = [1 << k for k in range(6, 20)]  # some lie in memory that was filled just now
    unwritten = lambda case: ([torch.empty(n, dtype=case.x.dtype) for n in sizes], False)  # noqa: E731
    monkeypatch.setattr(fuzz, "of_eager", unwritten)
    assert fuzz.eager_differs(case)


def test_reading_unwritten_memory_is_found_in_another_process(tmp_path, monkeypatch):
    assert not fuzz.eager_reads_unwritten(1, 3)
    environment = starting_with(
        tmp_path,
        "import torch\n"
        "from certify import fuzz\n"
        "fuzz.of_eager = lambda case: ([torch.empty(1000)], False)\n",
    )
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    assert fuzz.eager_reads_unwritten(1, 3)


def twice_the_error(y, x, layer):
    """The result with its error against fp64 doubled."""
    exact = layer.op.eager(*(t if t is None else t.detach().double() for t in (x, *layer.tensors)))
    return y + (y.detach().double() - exact).to(y.dtype)


def test_an_operator_that_is_less_exact_is_reported(monkeypatch):
    """No single result of it is wrong: fp32, twice eager's error."""
    planted(monkeypatch, twice_the_error)
    for name in set(fuzz_cases.OPERATORS) - {"linear", "mlp"}:
        monkeypatch.delitem(fuzz_cases.OPERATORS, name)  # so that it is drawn often enough
    wrong = fuzz.Trial.verdict(tried(range(300)))
    assert any("float32: ours worse" in text for text in wrong), wrong
    assert any("output" in text and "times eager's error" in text for text in wrong), wrong
