"""pack_weights: the same results, and never those of a weight that has changed since."""

import copy
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import RELU, Tally, add_checked, assert_bits, op_param, random_case, run

import torch_fused_linear as tfl

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {BF16: (7, 256, 96), FP32: (512, 400, 512)}  # tokens, inputs, outputs


@pytest.fixture(autouse=True)
def packing():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tfl.pack_weights(True), torch.no_grad():
        yield
    torch.set_num_threads(threads)


def path(call, *arguments):
    with tfl.explain() as report:
        call(*arguments)
    return report.calls[-1].path


def packs(dtype):
    """Whether this processor has anything to gain from it."""
    tokens, inputs, outputs = SIZES[dtype]
    layer = tfl.FusedLinear(inputs, outputs, dtype=dtype)
    x = torch.randn(tokens, inputs, dtype=dtype)
    return "packed" in [layer(x), path(layer, x)][1]


@pytest.fixture(params=[BF16, FP32], ids=["bf16", "fp32"])
def dtype(request):
    if not packs(request.param):
        pytest.skip("oneDNN is not used in this dtype on this processor")
    return request.param


def layer_and_input(dtype, layer=tfl.FusedLinearReLU):
    tokens, inputs, outputs = SIZES[dtype]
    torch.manual_seed(0)
    return layer(inputs, outputs, dtype=dtype), torch.randn(tokens, inputs, dtype=dtype)


def assert_right(layer, x):
    """Right for the weight as it is now, whichever way was taken; a stale one is far off."""
    want = torch.relu(F.linear(x.double(), layer.weight.double(), layer.bias.double()))
    torch.testing.assert_close(layer(x).double(), want, rtol=2e-2, atol=2e-2)


def packed_layer(dtype):
    layer, x = layer_and_input(dtype)
    layer(x)
    assert "packed" in path(layer, x)
    return layer, x


# --- the results --------------------------------------------------------------------------------


@op_param
@pytest.mark.parametrize("bias", [True, False])
def test_error_is_no_worse_than_eagers(dtype, op, bias):
    tokens, inputs, outputs = SIZES[dtype]
    tally = Tally()
    for seed, lead in enumerate([(tokens,), (1,), (2, 3 * tokens)]):
        case = random_case(lead, inputs, outputs, dtype, bias=bias, seed=seed)
        x, w, b = case.x, case.w, case.b
        op.call(x, w, b)
        mine = op.call(x, w, b)
        wide = [t if t is None else t.double() for t in (x, w, b)]
        truth = op.eager(*wide)
        add_checked(tally, mine, op.eager(x, w, b), truth, 1.0, f"{op!r} {lead}")
    tally.check(repr(op))


@op_param
def test_any_strides(dtype, op):
    tokens, inputs, outputs = SIZES[dtype]
    case = random_case((tokens,), inputs, outputs, dtype)
    bias = case.b.repeat_interleave(2)[::2]
    wide_input = torch.cat([case.x, case.x], 1)[:, :inputs]
    weight = torch.empty_strided(case.w.shape, (1, outputs), dtype=dtype).copy_(case.w)
    want = op.call(case.x, case.w, case.b)
    for _ in range(3):
        got = op.call(wide_input, weight, bias)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_nan_is_passed_on(dtype):
    tokens, inputs, outputs = SIZES[dtype]
    case = random_case((tokens,), inputs, outputs, dtype)
    case.x[3, 5] = torch.nan
    for _ in range(3):
        y = RELU.call(case.x, case.w, case.b)
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
    other = torch.nn.Parameter(2 * layer.weight)
    torch.utils.swap_tensors(layer.weight, other)


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
    assert "packed" in path(layer, x), "and is packed again"


def test_a_fresh_weight_at_the_address_of_a_dead_one(dtype):
    tokens, inputs, outputs = SIZES[dtype]
    x = torch.randn(tokens, inputs, dtype=dtype)
    addresses = set()
    for _ in range(50):
        layer = tfl.FusedLinearReLU(inputs, outputs, dtype=dtype)
        addresses.add(layer.weight.data_ptr())
        for _ in range(3):
            assert_right(layer, x)
        del layer
    assert len(addresses) < 50, "no address was used twice, so this has shown nothing"


def test_threads_share_a_layer_while_it_changes(dtype):
    """Between changes every thread sees the new weight, whoever packs it."""
    layer, x = layer_and_input(dtype)

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
def test_gradients_of_a_packed_weight(dtype, op):
    tokens, inputs, outputs = SIZES[dtype]
    case = random_case((tokens,), inputs, outputs, dtype)
    with torch.enable_grad(), tfl.pack_weights(False):
        want = run(op.call, case)
    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (case.x, case.w, case.b)]
        for _ in range(3):
            y = op.call(*leaves)
            got = [y.detach(), *torch.autograd.grad(y, leaves, case.g)]
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_a_weight_in_training_is_not_packed(dtype):
    layer, x = layer_and_input(dtype)
    for _ in range(4):
        assert "packed" not in path(layer, x)
        optimizer_step(layer)


def test_views_and_inference_tensors_are_not_packed(dtype):
    tokens, inputs, outputs = SIZES[dtype]
    case = random_case((tokens,), inputs, outputs, dtype)
    with torch.inference_mode():
        inference = case.w.clone()
    for weight in (case.w[:], case.w.t().contiguous().t(), inference):
        for _ in range(3):
            assert "packed" not in path(RELU.call, case.x, weight, case.b)


def test_off_by_default_and_switched_by_the_environment(dtype):
    code = (
        "import torch, torch_fused_linear as tfl; torch.set_grad_enabled(False);"
        f"layer = tfl.FusedLinear{SIZES[dtype][1:]}.to({dtype}); torch.set_num_threads(1);"
        f"x = torch.randn({SIZES[dtype][:2]}).to({dtype}); layer(x)\n"
        "with tfl.explain() as report: layer(x)\n"
        "print('packed' in report.calls[0].path)"
    )
    for value, answer in ((None, "False"), ("0", "False"), ("1", "True")):
        environment = {k: v for k, v in os.environ.items() if "PACK_WEIGHTS" not in k}
        if value is not None:
            environment["TORCH_FUSED_LINEAR_PACK_WEIGHTS"] = value
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert result.stdout.strip() == answer, result.stderr


def test_nested_and_put_back(dtype):
    layer, x = packed_layer(dtype)
    with tfl.pack_weights(False):
        assert "packed" not in path(layer, x)
        with tfl.pack_weights(True):
            layer(x)
            assert "packed" in path(layer, x)
        assert "packed" not in path(layer, x)


def test_the_module_is_untouched(dtype):
    layer, x = layer_and_input(dtype)
    before = copy.deepcopy(layer.state_dict())
    layer(x), layer(x)
    after = layer.state_dict()
    assert list(before) == list(after)
    assert_bits(list(after.values()), list(before.values()))
    assert list(dict(layer.named_buffers())) == []


def test_a_dead_weight_is_let_go_of(dtype):
    """Its copy is freed when the next one is packed."""
    resident = []
    tokens, _, _ = SIZES[dtype]
    for _ in range(6):
        layer = tfl.FusedLinear(2048, 4096, dtype=dtype)
        x = torch.randn(max(tokens, 512), 2048, dtype=dtype)
        layer(x), layer(x)
        assert "packed" in path(layer, x)
        del layer, x
        gc.collect()
        with open("/proc/self/statm") as file:
            resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    weight = 2048 * 4096 * dtype.itemsize
    assert resident[-1] - resident[1] < 3 * weight
