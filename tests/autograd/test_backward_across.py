"""_linear_backward_across: a layer's backward that also does the activation's of the layer before.

On a GPU, under "cublaslt", that is DRELU_BGRAD and DGELU_BGRAD. On a CPU the same tests hold the
reference, and with it the tests themselves.
"""

import itertools
import math

import pytest
import torch
from helpers import (
    DTYPES,
    Tally,
    decode_mask,
    encode_mask,
    one_thread,  # noqa: F401
    policy,
    ulp,
)

import torch_fused_linear as tfl

fused = torch.ops.fused
WIDTHS, TOKENS, INNER = [1, 2, 3, 7, 8, 64, 129, 257], [1, 2, 33, 64], [1, 2, 7, 64]
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)
policy_param = pytest.mark.parametrize("policy_name", ["auto", "cublaslt"])
# What the layer before has saved: ReLU's mask or output, else the pre-activation.
KINDS = [
    "relu mask",
    "relu output",
    "gelu_tanh rows",
    "gelu_tanh padded",
    "gelu_erf padded",
    "silu padded",
]
kind_param = pytest.mark.parametrize("kind", KINDS)


def saved_for(kind, z):
    if kind == "relu mask":
        return encode_mask(z >= 0)
    if kind == "relu output":
        return z.relu()
    if "padded" in kind:
        return torch.nn.functional.pad(z, (0, -z.shape[-1] % 8))[..., : z.shape[-1]]
    return z


class Case:
    """The backward of a layer of `inner` outputs whose input, `width` wide, was an activation's."""

    def __init__(self, kind, lead, width, inner, dtype, device, seed=0):
        gen = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=1.0):
            values = torch.randn(*shape, generator=gen, dtype=torch.float64) * scale
            return values.to(dtype).to(device)

        lead = (lead,) if isinstance(lead, int) else lead
        self.g, self.z = normal(*lead, inner), normal(*lead, width)
        self.z[self.z == 0] = 1  # where the two forms of ReLU differ, as they say
        self.w = normal(inner, width, scale=1 / math.sqrt(inner))
        self.x = self.z.cos()
        self.activation, self.saved = kind.split()[0], saved_for(kind, self.z)

    def across(self, wanted=(True, True, True), previous_bias=True, saved=None):
        """[dz of the layer before, weight, bias, bias of the layer before]"""
        saved = self.saved if saved is None else saved
        args = (self.g, self.x, self.w, None, "none", list(wanted))
        return fused._linear_backward_across(*args, saved, self.activation, previous_bias)

    def plain(self):
        """The same, step by step in the same dtype."""
        dx, dw, db = fused._linear_backward(self.g, self.x, self.w, None, "none", [True] * 3)
        dz, previous = fused._activation_backward(dx, self.saved, self.activation, True)
        return [dz, dw, db, previous]

    def truth(self):
        g, x, w, z = (t.double() for t in (self.g, self.x, self.w, self.z))
        z.requires_grad_()
        act = {
            "relu": torch.relu,
            "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
            "gelu_erf": torch.nn.functional.gelu,
            "silu": torch.nn.functional.silu,
        }[self.activation]
        (dz,) = torch.autograd.grad(act(z), z, g @ w)
        rows, inputs = g.flatten(0, -2), x.flatten(0, -2)
        return [dz, rows.t() @ inputs, rows.sum(0), dz.flatten(0, -2).sum(0)]

    def sizes(self):
        """How large each is where nothing cancels: what rounding errors are to be held against."""
        g, x, w = (t.double().flatten(0, -2).square() for t in (self.g, self.x, self.w))
        dz = g @ w
        return [float(t.max().sqrt()) for t in (dz, g.t() @ x, g.sum(0), dz.sum(0))]


NAMES = ["dz", "grad_weight", "grad_bias", "grad_previous_bias"]


@dtype_param
@policy_param
@kind_param
def test_errors_are_not_above_the_plain_paths(kind, policy_name, dtype, device):
    """All widths, tokens and inner sizes: 1.1 times the plain path's error and an ulp, worst case
    and mean; one case may be a little worse, as sums are taken in another order."""
    tallies = {name: Tally() for name in NAMES}
    for k, (width, tokens, inner) in enumerate(itertools.product(WIDTHS, TOKENS, INNER)):
        case = Case(kind, tokens, width, inner, dtype, device, seed=k)
        with policy(policy_name):
            columns = case.across(), case.plain(), case.truth(), case.sizes()
        for name, ours, plain, truth, size in zip(NAMES, *columns, strict=True):
            where = f"{name} of {tokens} x {width}, inner {inner}"
            assert ours.dtype == dtype and ours.shape == truth.shape, where
            unit = ulp(dtype, max(float(truth.abs().max()), size))
            if dtype == torch.float64:
                assert float((ours - truth).abs().max()) <= 64 * unit, where
                continue
            one = Tally()
            one.add(ours, plain, truth, unit)
            assert one.worst[0] <= 1.5 * one.worst[1] + 2.5, f"{where}: {one.worst} ulp"
            tallies[name].add(ours, plain, truth, unit)
    for name, tally in tallies.items():
        tally.check(f"{kind} {policy_name} {name}")


@dtype_param
@policy_param
def test_leading_dimensions(policy_name, dtype, device):
    for kind, lead in itertools.product(KINDS, [(2, 3), (2, 1, 5)]):
        case = Case(kind, lead, 16, 8, dtype, device)
        flat = Case(kind, math.prod(lead), 16, 8, dtype, device)  # the same numbers
        with policy(policy_name):
            got, want = case.across(), flat.across()
        assert got[0].shape == (*lead, 16)
        for a, b in zip(got, want):
            assert torch.equal(a.flatten(), b.flatten()), f"{kind} {lead}"


@kind_param
@policy_param
def test_only_what_is_wanted(policy_name, kind, device):
    case = Case(kind, 33, 24, 16, torch.bfloat16, device)
    with policy(policy_name):
        full = case.across()
        for dw, db, previous in itertools.product([True, False], repeat=3):
            got = case.across((True, dw, db), previous)
            for name, a, b, asked in zip(NAMES, got, full, (True, dw, db, previous)):
                assert a.shape == (b.shape if asked else (0,)), name
                if asked:
                    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def poison(case):
    """Leaves NaN in the memory that the results are likely to get."""
    sizes = [t.numel() for t in (case.z, case.w, case.g[0], case.z[0])]
    rooms = [case.g.new_full((size,), math.nan) for size in sizes for _ in range(8)]
    del rooms


@dtype_param
@kind_param
def test_bias_gradients_are_written_and_not_added_to(kind, dtype, device):
    """Into memory full of NaN, and again into memory that holds the first answer."""
    for tokens, width, inner in [(64, 64, 64), (33, 129, 7), (2, 8, 2), (64, 257, 1)]:
        case = Case(kind, tokens, width, inner, dtype, device)
        with policy("cublaslt"):
            case.across()
            poison(case)
            first = [t.clone() for t in case.across()]
            second = case.across()
        for name, a, b, want, size in zip(NAMES, first, second, case.truth(), case.sizes()):
            assert not a.isnan().any(), f"{name} of {tokens} x {width}, inner {inner}"
            assert torch.equal(a, b), name
            tolerance = 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(a.double(), want, rtol=tolerance, atol=tolerance * size)


@dtype_param
@kind_param
@policy_param
def test_the_same_bits_every_time(policy_name, kind, dtype, device):
    for tokens, width, inner in [(64, 64, 64), (33, 129, 7), (1, 8, 2)]:
        case = Case(kind, tokens, width, inner, dtype, device)
        with policy(policy_name):
            first = case.across()
            for _ in range(20):
                for name, a, b in zip(NAMES, case.across(), first):
                    assert torch.equal(a, b), f"{name} of {tokens} x {width}, inner {inner}"


def in_a_larger_buffer(saved, canary):
    """The same values with rows of the same stride before and behind, all of it `canary`."""
    stride = saved.stride(0) if saved.shape[0] > 1 else -(-saved.shape[1] // 8) * 8
    buffer = torch.full((saved.shape[0] + 2, stride), canary, dtype=saved.dtype).to(saved.device)
    inside = buffer[1:-1, : saved.shape[1]]
    inside.copy_(saved)
    return buffer, inside


@dtype_param
@policy_param
@kind_param
def test_nothing_else_is_written(kind, policy_name, dtype, device):
    """The saved tensor is read in place, within a buffer of canaries; no input changes."""
    for tokens, width, inner in itertools.product([2, 33, 64], WIDTHS, [2, 64]):
        case = Case(kind, tokens, width, inner, dtype, device)
        buffer, inside = in_a_larger_buffer(case.saved, 0x5A)
        before = [t.clone() for t in (buffer, case.g, case.x, case.w)]
        with policy(policy_name):
            got, want = case.across(saved=inside), case.across()
        for a, b in zip((buffer, case.g, case.x, case.w), before):
            assert torch.equal(a, b), f"{tokens} x {width}, inner {inner}: an input was written to"
        for name, a, b in zip(NAMES, got, want):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=name)


@policy_param
@dtype_param
def test_saved_by_any_forward(policy_name, dtype, device):
    """What each forward leaves, under each policy, is read by each backward."""
    for width in (1, 7, 64, 129):
        case = Case("relu output", 33, width, 8, dtype, device)
        v, b = torch.randn(width, 5, dtype=dtype, device=device), case.z[0]
        h = torch.randn(33, 5, dtype=dtype, device=device)
        for forward in ("auto", "cublaslt"):
            with policy(forward):
                y, mask = fused._linear_aux(h, v, b, "relu")
                _, z = fused._linear_aux(h, v, b, "gelu_tanh")
            clear = z.double().abs() > 1e-2  # the sign of 0 is a matter of rounding
            with policy(policy_name):
                case.activation = "relu"
                by_mask, by_output = case.across(saved=mask), case.across(saved=y)
                case.activation = "gelu_tanh"
                padded, dense = case.across(saved=z), case.across(saved=z.contiguous())
            assert torch.equal(decode_mask(mask, width)[clear], (z > 0)[clear])
            assert torch.equal(by_mask[0][clear], by_output[0][clear])
            for name, a, b_ in zip(NAMES, padded, dense):
                torch.testing.assert_close(a, b_, rtol=2e-2, atol=2e-2, msg=name)


# --- which epilogue ran -------------------------------------------------------------------------


def path_of(case, **options):
    with tfl.explain() as report:
        case.across(**options)
    (call,) = report.calls
    return call.path


@pytest.mark.cuda
@dtype_param
@pytest.mark.parametrize("kind", ["relu mask", "relu output", "gelu_tanh padded"])
def test_cublaslt_takes_the_librarys_epilogue(kind, dtype, cuda):
    name = "DRELU" if "relu" in kind else "DGELU"
    for width, tokens in itertools.product([8, 64, 128, 256], [2, 33, 64]):
        case = Case(kind, tokens, width, 64, dtype, cuda)
        with policy("cublaslt"):
            bias, alone = path_of(case), path_of(case, previous_bias=False)
        where = f"{tokens} x {width}"
        if "gelu" in kind and dtype.itemsize > 2:
            # There the library's tanh is approximate: it is never taken, and the row says so.
            assert "no GELU epilogue" in bias and "DGELU" not in bias, f"{where}: {bias}"
            continue
        if dtype.itemsize > 2 and any(why in bias + alone for why in ("less exact", "its trial")):
            continue  # of none of the library's, and the row says so
        assert f"{name}_BGRAD" in bias and f"(not {name}_BGRAD" not in bias, f"{where}: {bias}"
        assert name in alone and "BGRAD" not in alone.replace("BGRADB", ""), f"{where}: {alone}"


@pytest.mark.cuda
@dtype_param
@pytest.mark.parametrize("kind", ["relu mask", "gelu_tanh padded"])
def test_an_inner_size_of_one_is_kept_from_the_library(kind, dtype, cuda):
    """There D*_BGRAD gives wrong numbers: another way is taken, and the row says so."""
    name = "DRELU" if "relu" in kind else "DGELU"
    for width, tokens in itertools.product(WIDTHS, TOKENS):
        with policy("cublaslt"):
            path = path_of(Case(kind, tokens, width, 1, dtype, cuda))
        assert "own one-pass kernel" in path, path
        if "relu" in kind or dtype.itemsize == 2:
            assert f"(not {name}_BGRAD: " in path, path


@pytest.mark.cuda
def test_erf_never_takes_the_tanh_epilogue(cuda):
    case = Case("gelu_erf padded", 64, 64, 64, torch.bfloat16, cuda)
    for name in ("auto", "cublaslt"):
        with policy(name):
            assert "DGELU" not in path_of(case)
