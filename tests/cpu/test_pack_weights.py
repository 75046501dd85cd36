"""pack_weights: the same results, and never those of a weight that has changed since."""

import copy
import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from numerics import Tally, add_checked, assert_bits, in_double
from operators import LINEAR, op_param
from subclasses import Plain
from watching import operators_of

import torch_fused_linear as tfl

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {BF16: (7, 256, 96), FP32: (512, 400, 512)}  # tokens, inputs, outputs


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def path(call, *arguments):
    return operators_of(lambda: call(*arguments), "path")[-1]


def frozen(layer):
    tfl.pack_weights(layer.requires_grad_(False))
    return layer


def packs(dtype):
    """Returns whether packing is faster on this processor."""
    tokens, inputs, outputs = SIZES[dtype]
    layer = frozen(tfl.FusedLinear(inputs, outputs, dtype=dtype))
    return "packed" in path(layer, torch.randn(tokens, inputs, dtype=dtype))


@pytest.fixture(params=[BF16, FP32], ids=["bf16", "fp32"])
def dtype(request):
    if not packs(request.param):
        pytest.skip("oneDNN is not used in this dtype on this processor")
    return request.param


def layer_and_input(dtype, layer=tfl.FusedLinearReLU):
    tokens, inputs, outputs = SIZES[dtype]
    torch.manual_seed(0)
    made = layer(inputs, outputs, dtype=dtype).requires_grad_(False)
    return made, torch.randn(tokens, inputs, dtype=dtype)


def case_in(dtype):
    tokens, inputs, outputs = SIZES[dtype]
    return LINEAR.case((tokens,), inputs, outputs, dtype)


def assert_right(layer, x):
    """Right for the weight as it is now, whichever way was taken; a stale one is far off."""
    want = torch.relu(F.linear(x.double(), layer.weight.double(), layer.bias.double()))
    torch.testing.assert_close(layer(x).double(), want, rtol=2e-2, atol=2e-2)


def packed_layer(dtype):
    layer, x = layer_and_input(dtype)
    frozen(layer)
    assert "packed" in path(layer, x)
    return layer, x


# --- the results --------------------------------------------------------------------------------


@op_param
@pytest.mark.parametrize("bias", [True, False])
def test_error_is_no_worse_than_eagers(dtype, op, bias):
    tokens, inputs, outputs = SIZES[dtype]
    tally = Tally()
    for seed, lead in enumerate([(tokens,), (1,), (2, 3 * tokens)]):
        case = LINEAR.case(lead, inputs, outputs, dtype, bias=bias, seed=seed)
        torch.ops.fused._pack_weight(case.w, "weight")
        mine, eager = op.call(*case.inputs), op.eager(*case.inputs)
        truth = op.eager(*in_double(case).inputs)
        add_checked(tally, mine, eager, truth, 1.0, f"{op!r} {lead}")
    tally.check(repr(op))


@op_param
def test_any_strides_and_nan(dtype, op):
    case = case_in(dtype)
    bias = case.b.repeat_interleave(2)[::2]
    wide_input = torch.cat([case.x, case.x], 1)[:, : case.x.shape[1]]
    weight = torch.empty_strided(case.w.shape, (1, len(case.w)), dtype=dtype).copy_(case.w)
    want = op.call(case.x, case.w, case.b)
    torch.ops.fused._pack_weight(weight, "weight")
    for _ in range(3):
        torch.testing.assert_close(op.call(wide_input, weight, bias), want, rtol=2e-2, atol=2e-2)
    wide_input[3, 5] = torch.nan
    y = op.call(wide_input, weight, bias)
    assert y[3].isnan().all() and not y[4].isnan().any()


def test_tokens_of_another_number_use_the_same_copy(dtype):
    layer, x = packed_layer(dtype)
    for tokens in (2 * len(x), len(x) + 1):
        more = torch.randn(tokens, x.shape[1], dtype=dtype)
        assert "packed" in path(layer, more)
        assert_right(layer, more)
    assert layer(x[:0]).shape == (0, layer.out_features)


# --- a weight that has changed ------------------------------------------------------------------


def optimizer_step(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=1.0).step()


def load(layer, **options):
    state = {name: -value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, **options)


def new_data_twice(layer):
    """The second may lie where the first copied weight did."""
    for k in (2, 3):
        layer.weight.data = k * layer.weight.data.clone()


def swapped(layer):
    other = torch.nn.Parameter(2 * layer.weight, requires_grad=False)
    torch.utils.swap_tensors(layer.weight, other)


def refill(layer):
    """As the full weight of a sharded model comes and goes."""
    storage = layer.weight.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    layer.others = [torch.empty(size, dtype=torch.uint8) for _ in range(3)]  # in its old place
    storage.resize_(size)
    layer.weight.data.normal_()


CHANGES = {
    "optimizer step": optimizer_step,
    "load_state_dict": load,
    "load_state_dict, assigned": lambda layer: load(layer, assign=True),
    "copy_": lambda layer: layer.weight.copy_(torch.randn_like(layer.weight)),
    "in place": lambda layer: layer.weight.mul_(-1),
    "through a view": lambda layer: layer.weight[0].mul_(-5),
    "through detach": lambda layer: layer.weight.detach().mul_(-1),
    "new data": lambda layer: setattr(layer.weight, "data", -layer.weight.data),
    "new data twice": new_data_twice,
    "to and back": lambda layer: layer.double(),  # the test takes it back
    "swap_tensors": swapped,
    "other memory, without a trace": refill,
    "a new parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(-layer.weight)),
    "set_": lambda layer: layer.weight.set_(-layer.weight.clone()),
    "init": lambda layer: torch.nn.init.normal_(layer.weight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_noticed(dtype, change):
    layer, x = packed_layer(dtype)
    for _ in range(2):
        before = layer.weight.clone()
        CHANGES[change](layer)
        layer.to(dtype)
        if change != "to and back":
            assert not torch.equal(before, layer.weight), "nothing has changed"
        for _ in range(3):
            assert_right(layer, x)
    if change not in ("load_state_dict, assigned", "swap_tensors", "a new parameter"):
        assert "packed" in path(layer, x), "and is packed again"


WITHOUT_A_TRACE = {
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.randn_like(layer.weight)),
    "numpy": lambda layer: layer.weight.numpy().__imul__(-1),
}


@pytest.mark.parametrize("change", [*CHANGES, *WITHOUT_A_TRACE])
@pytest.mark.parametrize(
    "kind, mode",
    [(tfl.FusedLinearReLU, torch.no_grad), (tfl.FusedLinearGELU, torch.inference_mode)],
)
def test_a_call_keeps_no_copy_of_an_unpacked_weight(kind, mode, change):
    layer, x = layer_and_input(FP32, kind)
    keys = list(layer.state_dict())
    with mode():
        before = layer(x)
    (CHANGES | WITHOUT_A_TRACE)[change](layer)
    layer.to(FP32)
    with mode():
        fresh = copy.deepcopy(layer)(x)
        assert torch.equal(layer(x), fresh)
        assert change == "to and back" or not torch.equal(fresh, before)
    assert list(layer.state_dict()) == keys
    weight = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert weight() is None


def test_a_fresh_weight_at_the_address_of_a_dead_one(dtype):
    tokens, inputs, outputs = SIZES[dtype]
    x = torch.randn(tokens, inputs, dtype=dtype)
    addresses = set()
    for _ in range(50):
        layer = frozen(tfl.FusedLinearReLU(inputs, outputs, dtype=dtype))
        addresses.add(layer.weight.data_ptr())
        for _ in range(3):
            assert_right(layer, x)
        del layer
    assert len(addresses) < 50, "no address was used twice, so this has shown nothing"


def test_threads_share_a_layer_while_it_changes(dtype):
    """Between changes every thread sees the new weight, whoever packs it."""
    layer, x = packed_layer(dtype)

    def work(_):
        with torch.no_grad():
            return [layer(x) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            layer.weight.copy_(torch.randn_like(layer.weight) / layer.in_features**0.5)
            want = torch.relu(F.linear(x.double(), layer.weight.double(), layer.bias.double()))
            for results in pool.map(work, range(8)):
                for y in results:
                    torch.testing.assert_close(y.double(), want, rtol=2e-2, atol=2e-2)


# --- what is not packed -------------------------------------------------------------------------


@op_param
def test_gradients_beside_a_packed_weight(dtype, op):
    """As for an adapter beside a frozen layer: the input and the bias are trained."""
    case = case_in(dtype)
    with torch.enable_grad():
        x, b = case.x.clone().requires_grad_(), case.b.clone().requires_grad_()
        want = torch.autograd.grad(op.call(x, case.w, b), [x, b], case.g)
        torch.ops.fused._pack_weight(case.w, "weight")
        got = torch.autograd.grad(op.call(x, case.w, b), [x, b], case.g)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


ITSELF, FUSED = tfl.FusedLinearReLU, {"fused": True}
OTHERS = [tfl.FusedLinear, tfl.FusedLinearGELU, tfl.FusedLinearSiLU, None]


@pytest.mark.parametrize(
    "kind, options",
    [(ITSELF, {}), (ITSELF, {"foreach": True}), *((kind, FUSED) for kind in (ITSELF, *OTHERS))],
)
def test_a_weight_that_is_trained_again_is_no_longer_packed(dtype, kind, options):
    """Any layer may train it, also torch's own (None), and although a fused optimizer writes
    without a trace."""
    layer, x = packed_layer(dtype)
    other = layer.to_linear()
    if kind:
        other = layer if kind is ITSELF else kind.from_linear(other)
    layer.requires_grad_(True)
    steps = torch.optim.AdamW(layer.parameters(), lr=0.5, **options)
    for _ in range(2):
        with torch.enable_grad():
            other(x).square().mean().backward()
        steps.step()
        steps.zero_grad()
        if kind is ITSELF:  # of the others' training nothing is told but by the weight
            assert "packed" not in path(layer, x)
            assert_right(layer, x)
    layer.requires_grad_(False)
    assert "packed" not in path(layer, x), "it must be asked for again"
    assert_right(layer, x)
    assert "packed" in path(frozen(layer), x)
    assert_right(layer, x)


def test_packing_again_makes_a_new_copy(dtype):
    """After a write that torch does not count, and a step that our layer has not seen."""
    layer, x = packed_layer(dtype)
    layer.weight.data.mul_(2)
    assert "packed" in path(frozen(layer), x)
    assert_right(layer, x)
    with torch.enable_grad():
        F.linear(x, layer.weight.requires_grad_()).sum().backward()
    assert "packed" in path(frozen(layer), x)


def test_nothing_else_is_packed_or_changed(dtype):
    layer, x = layer_and_input(dtype)
    before = copy.deepcopy(layer.state_dict())
    other, _ = packed_layer(dtype)
    after = other.state_dict()
    assert list(before) == list(after) and not list(other.buffers())
    assert_bits(list(after.values()), list(before.values()))
    for _ in range(3):
        assert "packed" not in path(layer, x)
    assert tfl.unpack_weights(layer) == 0 and tfl.unpack_weights(other) == 1
    assert "packed" not in path(other, x)


def linear(weight):
    layer = torch.nn.Linear(4, 3)
    layer.weight = torch.nn.Parameter(weight, requires_grad=weight.requires_grad)
    return layer


def in_inference_mode():
    with torch.inference_mode():
        return torch.nn.Linear(4, 3).requires_grad_(False)


WEIGHT = torch.ones(3, 4)
REFUSED = {
    "requires_grad": (lambda: torch.nn.Linear(4, 3), ValueError, "frozen"),
    "meta": (lambda: linear(torch.empty(3, 4, device="meta")), ValueError, "on the CPU, got meta"),
    "inference": (in_inference_mode, ValueError, "inference tensor"),
    "integer": (lambda: linear(WEIGHT.char()), NotImplementedError, "got Char"),
    "subclass": (lambda: linear(WEIGHT.as_subclass(Plain)), TypeError, "plain tensor, got"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_name_of_the_weight(name):
    make, kind, text = REFUSED[name]
    first = torch.nn.Linear(4, 4).requires_grad_(False)
    model = torch.nn.Sequential(first, make())
    with pytest.raises(kind, match=rf"pack_weights: '1.weight' must.*{text}"):
        tfl.pack_weights(model)
    assert tfl.unpack_weights(first) == 0, "the first was declared all the same"
    with pytest.raises(ValueError, match="a tensor of its own, got a view"):
        torch.ops.fused._pack_weight(torch.ones(4, 4)[:2], "weight")


def test_a_model_is_packed_once_for_each_weight():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).requires_grad_(False)
    model[2].weight = model[0].weight
    assert tfl.pack_weights(model) == 2
    assert tfl.pack_weights(model) == 2, "asking again changes nothing"
    assert tfl.unpack_weights(model[1]) == 1 and tfl.unpack_weights(model) == 1


def test_a_dead_weight_is_let_go_of(dtype):
    """Its copy is freed when the next one is packed."""
    resident = []
    for _ in range(6):
        layer = frozen(tfl.FusedLinear(2048, 4096, dtype=dtype))
        x = torch.randn(max(SIZES[dtype][0], 512), 2048, dtype=dtype)
        assert "packed" in path(layer, x)
        del layer, x
        gc.collect()
        with open("/proc/self/statm") as file:
            resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert resident[-1] - resident[1] < 3 * 2048 * 4096 * dtype.itemsize
