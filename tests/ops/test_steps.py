"""The operators under the public ones: what is kept, ReLU's bits, and the backward's steps.

On a GPU, under "cublaslt", the step across two layers is DRELU_BGRAD and DGELU_BGRAD. On a CPU the
same tests hold the reference, and with it the tests themselves.
"""

import itertools
import math

import operators as ops
import pytest
import torch
import torch.nn.functional as F
from helpers import setting
from layouts import ND_LAYOUTS
from numerics import Tally, add_checked, assert_bits, assert_same, run
from places import places
from steps import decode_mask, encode_mask, padded, saved_for
from watching import operators_of

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

fused = torch.ops.fused
WIDTHS = [1, 2, 3, 7, 8, 64, 127, 128, 129, 257, 479, 785]
LEADS = [(), (5,), (2, 3)]
MASKS = list(itertools.product([False, True], repeat=3))


def level(dtype):
    """Two roundings, or those of fp64's own functions."""
    eps = torch.finfo(dtype).eps
    return {"rtol": 4 * eps, "atol": 1e-14 if dtype == torch.float64 else max(4 * eps, 1e-5)}


# --- what a forward keeps ------------------------------------------------------------------------


@ops.dtype_param
@pytest.mark.parametrize("activation", ops.ACTS)
def test_saved_tensors_of_a_forward(activation, dtype, device):
    """ReLU saves bit o & 7 of byte o >> 3, set if z >= 0 (zeros occur without a bias), with padding
    of 0; the others save z."""
    sizes = [*itertools.product(LEADS, [6], [0, *WIDTHS]), ((0,), 6, 5), ((3,), 0, 5), ((0,), 0, 0)]
    for (lead, i, o), bias in itertools.product(sizes, [True, False]):
        case = ops.LINEAR.exact_case(lead, i, o, dtype, device, bias)
        y, kept = fused._linear_aux(*case.inputs[:2], case.b, NUMBERS[activation])
        z = ops.LINEAR.eager(*(t.double() for t in case.inputs))
        assert y.dtype == dtype and y.shape == z.shape
        if activation == "relu":
            assert torch.equal(y.double(), z.relu())
            assert kept.dtype == torch.uint8 and torch.equal(kept, encode_mask(z >= 0))
            continue
        assert torch.equal(kept.double(), z) and kept.dtype == dtype and kept.stride(-1) == 1
        if lead and o > 1 and kept.numel():
            assert kept.stride(-2) == (o + 7) // 8 * 8, "rows are padded to 8 elements"
        torch.testing.assert_close(y.double(), ops.ACTS[activation](z), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_gated_layers_forward(keeps, bias, device):
    case = ops.LINEAR.case((7,), 8, 12, torch.float32, device, bias)
    want = ops.LINEAR.eager(*case.inputs)
    gate, up = want.chunk(2, -1)
    one = (case.w, None, case.b, None)
    two = (*case.w.chunk(2), *(case.b.chunk(2) if bias else (None, None)))
    for given, kept in ((one, [want]), (two, [gate, up])):
        output, *got = fused._linear_glu_aux(case.x, *given, NUMBERS["silu"], keeps)
        got = [z for z in got if z.numel()]
        assert_same([output, *got], [F.silu(gate) * up, *(kept if keeps else [])])


@pytest.mark.parametrize("form, products", [*zip(ops.FORMS, (2, 1, 1, 2))])
def test_one_product_where_gate_and_up_are_neighbours(form, products):
    op = ops.gated(form, "silu")
    ran = operators_of(lambda: op.call(*op.case((7,), 8, 6).inputs))
    assert ran == ["linear"] * products + ["_glu"]


# --- ReLU's bits of an output --------------------------------------------------------------------

BIT_WIDTHS = [*range(131), 136, 255, 256, 257, 384, 1000, 1001, 1024, 1025, 3072]
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def values(shape, dtype, device):
    """Numbers of both signs, and often one of those that a comparison may get wrong."""
    info = torch.finfo(dtype)
    edges = [0.0, torch.nan, torch.inf, info.max, info.tiny, info.tiny / 4, 1.0]  # subnormal
    edges = torch.tensor(edges, dtype=torch.float64)
    edges = torch.cat([edges, edges.neg()]).to(dtype)
    some = edges[torch.randint(len(edges), shape)]
    return torch.where(torch.rand(shape) < 0.5, some, torch.randn(shape).to(dtype)).to(device)


def assert_bits_of(output, label=""):
    """By torch's rule: where output <= 0 no gradient passes; where it is NaN, it does."""
    mask, want = fused._relu_mask(output), encode_mask(~(output <= 0))
    assert mask.dtype == torch.uint8 and mask.shape == want.shape and mask.is_contiguous(), label
    assert torch.equal(mask, want), label


@ops.dtype_param
def test_bits_of_every_width_and_kind_of_number(dtype, device):
    for width, lead in itertools.product(BIT_WIDTHS, [(), (0,), (1,), (5,), (2, 3), (2, 0)]):
        assert_bits_of(values((*lead, width), dtype, device), f"{lead} x {width}")
    integers = INTEGERS[dtype.itemsize]
    if dtype.itemsize == 2:  # all that there are
        patterns = torch.arange(-(2**15), 2**15, dtype=integers)
    else:
        info = torch.iinfo(integers)
        patterns = torch.randint(info.min, info.max, (2**16,), dtype=integers)
    numbers = patterns.view(dtype).to(device)
    assert numbers.isnan().any()
    assert_bits_of(numbers.view(64, 1024))
    assert_bits_of(numbers[:-64].view(64, 1023))


@ops.dtype_param
def test_bits_of_any_layout_and_address(dtype, device):
    """Around the views is NaN, whose bits are set: it would show. Vectors of 16 bytes must not be
    asked for where none can start, nor beyond the end."""
    for (name, layout), width in itertools.product(ND_LAYOUTS.items(), (7, 8, 24, 129, 256)):
        for shape in [(4, width), (3, 5, width)][: 1 if name == "overlapping" else 2]:
            assert_bits_of(layout(values(shape, dtype, device)), f"{name} {shape}")
    store = values((40 * 40,), dtype, device)
    for offset, row in itertools.product(range(17), (24, 31, 32, 33)):
        assert_bits_of(store.as_strided((9, 24), (row, 1), offset), f"{offset}, {row}")
    with setting(torch.set_num_threads, 3, 1):
        for shape in [(3001, 257), (70_001, 8), (1_000_003,)]:
            assert_bits_of(values(shape, dtype, device), f"{shape} on three threads")


@pytest.mark.cuda
@pytest.mark.parametrize("rows, width", [(65535 * 16 * 4 + 1001, 1), (2**16 + 3, 2**15 + 8)])
def test_bits_of_more_rows_than_a_grid_has_and_more_elements_than_32_bits_count(rows, width, cuda):
    """A block has 16 rows of one element, its threads 4 each; a grid has 65535 blocks down."""
    output = torch.zeros(rows, width, dtype=torch.bfloat16, device=cuda)
    output[-3:] = values((3, width), torch.bfloat16, cuda)
    mask = fused._relu_mask(output)
    assert torch.equal(mask[-3:], encode_mask(~(output[-3:] <= 0)))
    assert torch.count_nonzero(mask[:-3]) == 0


def test_bits_of_subnormal_numbers_flushed_to_zero():
    """By torch's switch: they are zeros then, but not in fp16, which is compared in fp32."""
    if not torch.set_flush_denormal(True):
        pytest.skip("not on this processor")
    with setting(torch.set_flush_denormal, True, False):
        for dtype in ops.DTYPES:
            output = torch.full((3, 130), torch.finfo(dtype).tiny / 4, dtype=dtype)
            assert_bits_of(output, dtype)
            assert (fused._relu_mask(output).sum() == 0) == (dtype != torch.float16)


@ops.dtype_param
def test_which_kernel_makes_the_bits(dtype, device):
    """Ours, but under the policy "eager", in torch.func and of what is traced without data."""
    output = values((6, 200), dtype, device)
    ran = operators_of(lambda: fused._relu_mask(output), "path", "shapes")
    assert ran == [("own mask kernel", "[6, 200]")]
    op = ops.linear("relu", memory="low")
    leaves = op.case((6,), 8, 200, dtype, device).leaves()
    ((name, path),) = operators_of(lambda: op.call(*leaves), "operator", "path")
    assert name == "_linear_relu_bits" and path.endswith(("own mask kernel", "own Hopper kernel"))
    want = fused._relu_mask(output)
    with tfl.set_policy("eager"), torch.inference_mode():
        ran = operators_of(lambda: fused._relu_mask(output), "path")
        assert ran == ["PyTorch's own (not fused)"]
        assert fused._relu_mask(output.t().contiguous().t()).is_contiguous()
        assert torch.equal(fused._relu_mask(output), want)
    assert torch.equal(torch.vmap(fused._relu_mask)(output), want)
    assert torch.equal(torch.vmap(fused._relu_mask, in_dims=1)(output.t().contiguous()), want)
    assert not fused._relu_mask(output.requires_grad_()).requires_grad


@ops.dtype_param
@places()
def test_a_layers_bits_are_those_of_its_output(policy, dtype, device):
    sizes = [((), 4, 1), ((5,), 7, 129), ((2, 3), 16, 256), ((300,), 64, 64), ((0,), 3, 5)]
    for lead, i, o in [*sizes, ((3,), 0, 5), ((3,), 4, 0)]:
        x, w, b = (values(shape, dtype, device) for shape in [(*lead, i), (o, i), (o,)])
        for bias in (b, None):
            with tfl.set_policy(policy):
                y, mask = fused._linear_relu_bits(x, w, bias)
                want = fused.linear_relu(x, w, bias)
            assert torch.equal(mask, encode_mask(~(y <= 0))), f"{lead} x {i} -> {o}"
            assert torch.equal(y.isnan(), want.isnan()) and y.shape == want.shape


# --- the activation's gradient -------------------------------------------------------------------


def true_dz(activation, z, g):
    z = z.detach().double().requires_grad_()
    act = ops.ACTS.get(activation, lambda t: t * 1)
    return torch.autograd.grad(act(z), z, g.double())[0]


@ops.dtype_param
@pytest.mark.parametrize("activation", ["none", *ops.ACTS])
def test_activation_backward(activation, dtype, device):
    eps = torch.finfo(dtype).eps
    for o, lead in zip(WIDTHS * 2, itertools.cycle([(), (257,), (33,), (2, 3), (1,)])):
        case = ops.LINEAR.case(lead, 3, o, dtype, device, seed=o)
        z = ops.LINEAR.eager(*(t.double() for t in case.inputs)).to(dtype)
        z = z.masked_fill(z == 0, 1)  # there the two saved forms of ReLU differ, as they say
        want = true_dz(activation, z, case.g)
        # 'none' reads nothing from saved: any tensor will do
        for saved in saved_for(activation, z).values() or [z]:
            dz, db = fused._activation_backward(case.g, saved, NUMBERS[activation], True)
            assert dz.dtype == db.dtype == dtype and dz.shape == z.shape and db.shape == (o,)
            torch.testing.assert_close(dz.double(), want, **level(dtype))
            # the bias gradient sums dz in fp32 or better, not in the dtype
            table = want.reshape(-1, o)
            total, spread = table.sum(0), float(table.abs().sum(0).max())
            near = 2 * eps * (1 + float(total.abs().max()) + spread / len(table) ** 0.5)
            torch.testing.assert_close(db.double(), total, rtol=2 * eps, atol=near)
            again, none = fused._activation_backward(case.g, saved, NUMBERS[activation], False)
            torch.testing.assert_close(again.double(), want, **level(dtype))
            assert none.numel() == 0 and none.dtype == dtype


@pytest.mark.parametrize("activation", ["none", *ops.ACTS])
def test_activation_backward_takes_any_layout(activation, device):
    for dtype, lead in [(torch.float32, (4, 3)), (torch.bfloat16, (12,)), (torch.float64, (12,))]:
        case = ops.LINEAR.case(lead, 3, 24, dtype, device)
        z = ops.LINEAR.eager(*case.inputs)

        def step(g, saved):
            return fused._activation_backward(g, saved, NUMBERS[activation], True)

        kept = list(saved_for(activation, z).values()) or [z]
        for (name, layout), saved in itertools.product(ND_LAYOUTS.items(), kept):
            g = layout(case.g)
            for a, b in zip(step(g, saved), step(g.contiguous(), saved)):
                torch.testing.assert_close(a, b, msg=f"grad_output {name}")
        for name in ("transposed", "row_strided", "column_strided", "offset", "outer_swapped"):
            for a, b in zip(step(case.g, ND_LAYOUTS[name](kept[0])), step(case.g, kept[0])):
                torch.testing.assert_close(a, b, msg=f"saved {name}")


# --- a layer's backward --------------------------------------------------------------------------


@ops.dtype_param
@ops.op_param
def test_linear_backward_gives_what_was_asked(op, dtype, device):
    """Integers give exact results if the activation is not smooth."""
    near = 16 * torch.finfo(dtype).eps * (op in ops.SMOOTH)
    for o, lead in itertools.product([1, 8, 129], LEADS):
        case = (op.case if op in ops.SMOOTH else op.exact_case)(lead, 6, o, dtype, device)
        everything = run(op.eager, case)[1:]
        for saved in saved_for(op.activation, ops.LINEAR.eager(*case.inputs)).values() or [None]:
            args = (case.g, case.x, case.w, saved, NUMBERS[op.activation])
            for wanted in MASKS:
                got = fused._linear_backward(*args, wanted)
                for mine, want, asked in zip(got, everything, wanted):
                    assert mine.dtype == dtype and mine.shape == (want.shape if asked else (0,))
                    if asked:
                        torch.testing.assert_close(mine, want, rtol=near, atol=near * 4)


# --- the same, across two layers -----------------------------------------------------------------

ACROSS_WIDTHS = [1, 2, 3, 7, 8, 64, 129, 257]
TOKENS, INNER = [1, 2, (3, 11), (2, 1, 32)], [1, 2, 7, 64]
KINDS = [(a, form) for a in ops.ACTS for form in saved_for(a, torch.ones(1, 1))]
kind_param = pytest.mark.parametrize("kind", KINDS, ids=" ".join)
ways_param = places(["auto"], ["auto", "cublaslt"])
NAMES = ["dz", "grad_weight", "grad_bias", "grad_previous_bias"]


class Across:
    """The backward of a layer of `inner` outputs whose input, `width` wide, was an activation's."""

    def __init__(self, kind, lead, width, inner, dtype, device, seed=0):
        case = ops.LINEAR.case(lead, width, inner, dtype, device, seed=seed)
        self.g, self.w, self.z = case.g, case.w, case.x
        self.z[self.z == 0] = 1  # where the two forms of ReLU differ, as they say
        self.x = self.z.cos()
        self.activation, self.saved = kind[0], saved_for(kind[0], self.z)[kind[1]]

    def across(self, wanted=(True, True, True), previous_bias=True, saved=None):
        """[dz of the layer before, weight, bias, bias of the layer before]"""
        saved = self.saved if saved is None else saved
        args = (self.g, self.x, self.w, None, NUMBERS["none"], list(wanted))
        previous = saved, NUMBERS[self.activation], previous_bias
        return fused._linear_backward_across(*args, *previous)

    def plain(self):
        """The same, step by step in the same dtype."""
        layer = self.g, self.x, self.w, None, NUMBERS["none"]
        dx, dw, db = fused._linear_backward(*layer, [True] * 3)
        number = NUMBERS[self.activation]
        dz, previous = fused._activation_backward(dx, self.saved, number, True)
        return [dz, dw, db, previous]

    def truth(self):
        g, x, w = (t.double() for t in (self.g, self.x, self.w))
        dz = true_dz(self.activation, self.z, g @ w)
        table, inputs = g.flatten(0, -2), x.flatten(0, -2)
        return [dz, table.t() @ inputs, table.sum(0), dz.flatten(0, -2).sum(0)]

    def sizes(self):
        """How large each is where nothing cancels: what rounding errors are to be held against."""
        g, x, w = (t.double().flatten(0, -2).square() for t in (self.g, self.x, self.w))
        dz = g @ w
        return [float(t.max().sqrt()) for t in (dz, g.t() @ x, g.sum(0), dz.sum(0))]


@ops.dtype_param
@ways_param
@kind_param
def test_errors_across_are_not_above_the_plain_paths(kind, policy, dtype, device):
    """All widths, tokens and inner sizes: 1.1 times the plain path's error and an ulp, worst case
    and mean; one case may be a little worse, as sums are taken in another order."""
    tallies = {name: Tally() for name in NAMES}
    sizes = list(enumerate(itertools.product(ACROSS_WIDTHS, TOKENS, INNER)))
    for k, (width, t, inner) in sizes if device.type == "cuda" else sizes[::3]:
        case = Across(kind, t, width, inner, dtype, device, seed=k)
        with tfl.set_policy(policy):
            columns = case.across(), case.plain(), case.truth(), case.sizes()
        for name, ours, plain, truth, size in zip(NAMES, *columns, strict=True):
            where = f"{name} of {t} x {width}, inner {inner}"
            assert ours.dtype == dtype and ours.shape == truth.shape, where
            add_checked(tallies[name], ours, plain, truth, size, where, slack=5 / 6)
    for name, tally in tallies.items():
        tally.check(f"{kind} {policy} {name}")


@ops.dtype_param
@ways_param
@kind_param
def test_only_what_is_wanted(kind, policy, dtype, device):
    case = Across(kind, 33, 24, 16, dtype, device)
    with tfl.set_policy(policy):
        full = case.across()
        for dw, db, previous in MASKS:
            got = case.across((True, dw, db), previous)
            for name, a, b, asked in zip(NAMES, got, full, (True, dw, db, previous)):
                assert a.shape == (b.shape if asked else (0,)), name
                if asked:
                    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def poison(case):
    """Leaves NaN in the memory that the results are likely to get."""
    sizes = [t.numel() for t in (case.z, case.w, case.g[0], case.z[0])]
    [case.g.new_full((size,), math.nan) for size in sizes for _ in range(8)]


def in_a_larger_buffer(saved, canary):
    """Returns the values between rows of `canary` with the same stride before and after them."""
    stride = saved.stride(0) if saved.shape[0] > 1 else -(-saved.shape[1] // 8) * 8
    buffer = torch.full((saved.shape[0] + 2, stride), canary, dtype=saved.dtype).to(saved.device)
    inside = buffer[1:-1, : saved.shape[1]]
    inside.copy_(saved)
    return buffer, inside


@ops.dtype_param
@ways_param
@kind_param
def test_results_alone_are_written_and_not_added_to(kind, policy, dtype, device):
    """Into memory full of NaN and into memory that holds the first answer, from a saved tensor that
    lies within canaries."""
    for tokens, width, inner in itertools.product([2, 33, 64], ACROSS_WIDTHS, [1, 64]):
        case, where = Across(kind, tokens, width, inner, dtype, device), (tokens, width, inner)
        buffer, inside = in_a_larger_buffer(case.saved, 0x5A)
        given = (buffer, case.g, case.x, case.w)
        before = [t.clone() for t in given]
        with tfl.set_policy(policy):
            want = case.across()
            poison(case)
            first = [t.clone() for t in case.across(saved=inside)]
            for _ in range(3):
                assert_bits(case.across(saved=inside), first, where)
        assert_bits(given, before, f"{where}: an input was written to,")
        for name, a, b in zip(NAMES, first, want):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=f"{name} {where}")


@ways_param
@ops.dtype_param
def test_saved_by_any_forward(policy, dtype, device):
    """Every backward reads the saved tensor of every forward, under each policy."""
    for width, forward in itertools.product((1, 7, 64, 129), ("auto", "cublaslt")):
        case = Across(("relu", "output"), 33, width, 8, dtype, device)
        v, b = torch.randn(width, 5, dtype=dtype, device=device), case.z[0]
        h = torch.randn(33, 5, dtype=dtype, device=device)
        with tfl.set_policy(forward):
            y, mask = fused._linear_aux(h, v, b, NUMBERS["relu"])
            _, z = fused._linear_aux(h, v, b, NUMBERS["gelu_tanh"])
        clear = z.double().abs() > 1e-2  # the sign of 0 is a matter of rounding
        with tfl.set_policy(policy):
            by_mask, by_output = case.across(saved=mask), case.across(saved=y)
            case.activation = "gelu_tanh"
            rows_, dense = case.across(saved=padded(z)), case.across(saved=z.contiguous())
        assert torch.equal(decode_mask(mask, width)[clear], (z > 0)[clear])
        assert torch.equal(by_mask[0][clear], by_output[0][clear])
        for name, got, want in zip(NAMES, rows_, dense):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, msg=name)


def path_of(case, policy, **options):
    with tfl.set_policy(policy):
        ((path, _),) = operators_of(lambda: case.across(**options), "path", "dtype")
    return path


@pytest.mark.cuda
@ops.dtype_param
@pytest.mark.parametrize("kind", [*KINDS[:2], ("gelu_tanh", "padded")], ids=" ".join)
def test_cublaslt_takes_the_librarys_epilogue(kind, dtype, cuda):
    name = "DRELU" if kind[0] == "relu" else "DGELU"
    for width, tokens in itertools.product([8, 64, 128, 256], [2, 33, 64]):
        case = Across(kind, tokens, width, 64, dtype, cuda)
        bias = path_of(case, "cublaslt")
        alone = path_of(case, "cublaslt", previous_bias=False)
        where = f"{tokens} x {width}"
        if kind[0] != "relu" and dtype.itemsize > 2:
            # There the library's tanh is approximate: it is never taken, and the row says so.
            assert "no GELU epilogue" in bias and "DGELU" not in bias, f"{where}: {bias}"
            continue
        if dtype.itemsize > 2 and any(why in bias + alone for why in ("less exact", "its trial")):
            continue  # of none of the library's, and the row says so
        assert f"{name}_BGRAD" in bias and f"(not {name}_BGRAD" not in bias, f"{where}: {bias}"
        assert name in alone and "BGRAD" not in alone.replace("BGRADB", ""), f"{where}: {alone}"


@pytest.mark.cuda
@ops.dtype_param
@pytest.mark.parametrize("kind", [("relu", "mask"), ("gelu_tanh", "padded")], ids=" ".join)
def test_an_inner_size_of_one_is_kept_from_the_library(kind, dtype, cuda):
    """There D*_BGRAD gives wrong numbers: another way is taken, and the row says so."""
    name = "DRELU" if kind[0] == "relu" else "DGELU"
    for width, tokens in itertools.product(ACROSS_WIDTHS, TOKENS):
        path = path_of(Across(kind, tokens, width, 1, dtype, cuda), "cublaslt")
        assert "own one-pass kernel" in path, path
        if kind[0] == "relu" or dtype.itemsize == 2:
            assert f"(not {name}_BGRAD: " in path, path


# --- a gated block's, with the layer after it ----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ops.ACTS)
def test_gated_backward_through_the_layer_after(activation, dtype, device):
    """In one step what the product and the pass are in two."""
    first, second = (ops.LINEAR.case((3, 50), 24, 40, dtype, device, seed=k) for k in (0, 1))
    grad, down, gate, up = first.g, first.w, first.x, second.x
    wide = (t.double() for t in (gate, up))
    dh = grad.double() @ down.double()
    number = NUMBERS[activation]
    exact = fused._glu_backward(dh, *wide, number, [True, True, False, False, True])
    near = 1e-12 if dtype == torch.float64 else 2e-2
    for keeps in (True, False):
        wanted = [True, True, False, False, keeps]
        of_two = fused._glu_backward(grad, gate, up, number, wanted, down)
        wanted[1] = False
        both = torch.cat([gate, up], -1)
        of_one = fused._glu_backward(grad, both, None, number, wanted, down)
        for gate_grad, up_grad, *sums, h in (of_two, (*of_one[0].chunk(2, -1), *of_one[2:])):
            assert not sum(s.numel() for s in sums) and bool(h.numel()) == keeps
            found = [gate_grad, up_grad, *([h] if keeps else [])]
            for got, want in zip(found, (*exact[:2], exact[4])):
                torch.testing.assert_close(got.double(), want, rtol=near, atol=near)
