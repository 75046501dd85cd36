"""memory='low' of gated layers: what is kept, and the bits that keeping more would give."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gated import FORMS, Gated, activation_param, form_param
from helpers import Storages, assert_bits, device_param, kept_bytes, one_thread  # noqa: F401
from stacks import HANDED, assert_same
from torch import nn

import torch_fused_linear as tfl

fused = torch.ops.fused
BLOCK, LAYER = (16, 24, 8), (16, 24, None)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Pair:
    """A gated layer and a linear one after it."""

    def __init__(self, form, dtype, device, memory="low", wanted="all", activation="silu"):
        options = {"dtype": dtype, "device": device, "memory": memory}
        self.glu = Gated(form, (5, 7), LAYER, activation=activation, **options)
        weight = torch.linspace(-1, 1, 9 * 24).sin().view(9, 24).to(device, dtype)
        self.down = weight.requires_grad_(wanted != "frozen down")
        for leaf in self.glu.leaves[1:]:
            leaf.requires_grad_(wanted != "frozen gate and up")

    def __call__(self):
        return fused.linear(self.glu.call(), self.down)

    def results(self):
        y = self()
        leaves = [t for t in [*self.glu.leaves, self.down] if t.requires_grad]
        return [y, *torch.autograd.grad(y, leaves, y.detach().cos())]


# --- a block keeps gate's pre-activation alone ---------------------------------------------------


@device_param
@form_param
@dtype_param
def test_bytes_of_a_block(dtype, form, device):
    low, default = (Gated(form, (64,), BLOCK, dtype, device, memory=m) for m in ("low", "default"))
    hidden = 64 * 24 * dtype.itemsize
    assert kept_bytes(default.call) == 2 * hidden
    assert kept_bytes(low.call) == (2 if form == "stacked" else 1) * hidden


@device_param
@form_param
@pytest.mark.parametrize("memory", ["default", "low"])
def test_a_step_takes_no_more_than_eagers_at_its_peak(memory, form, device):
    """The pre-activations go before the weights' gradients come, unless the graph is kept."""
    block = Gated(form, (96,), (64, 192, 64), torch.float32, device, memory=memory)

    def peak(call, **options):
        with Storages() as storages:
            block.grads(call(), **options)
        return storages.most

    ours = peak(block.call)
    assert ours <= peak(block.eager)
    if memory == "default":  # with low memory the peak comes before
        assert ours < peak(block.call, retain_graph=True)


@device_param
@activation_param
@dtype_param
def test_a_product_made_again_has_the_same_bits(dtype, activation, device):
    for lead in ((), (1,), (5, 7), (0,)):
        results = []
        for memory in ("low", "default"):
            block = Gated("apart", lead, BLOCK, dtype, device, activation=activation, memory=memory)
            y = block.call()
            results.append([y, *block.grads(y)])
        assert_bits(*results, str(lead))


@form_param
def test_gradients_of_every_order(form):
    for sizes in ((3, 4, 2), (3, 4, None)):
        block = Gated(form, (2,), sizes, memory="low", seed=1)
        leaves = tuple(block.leaves)
        assert torch.autograd.gradcheck(block.call, leaves, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(block.call, leaves)


@device_param
@form_param
def test_subsets_keep_no_more_than_by_default(form, device):
    """What would be kept for a product to be made again counts as well."""
    sizes = (8, 24, 8)
    count = len(Gated(form, (3,), sizes).leaves)
    for wanted in range(1, 2**count):
        kept = []
        for memory in ("low", "default"):
            block = Gated(form, (3,), sizes, device=device, memory=memory)
            for k, leaf in enumerate(block.leaves):
                leaf.requires_grad_(bool(wanted >> k & 1))
            assert_same(block.grads(block.call()), block.grads(block.eager()), bin(wanted))
            kept.append(kept_bytes(block.call))
        assert kept[0] <= kept[1], bin(wanted)


def test_up_is_multiplied_with_again_only_where_it_is_read():
    block = Gated("apart", (5,), (6, 8, 4), memory="low")
    for asked, again in ((block.leaves, 1), ([block.down_bias], 0), ([block.down], 1)):
        with tfl.explain() as report:
            y = block.call()
            forward = len(report.calls)
            torch.autograd.grad(y, asked, block.g)
        assert forward == 0, "reports end with the block"
        names = [call.operator for call in report.calls]
        assert names.count("linear") == 3 + again, names


def test_a_write_to_what_the_product_needs_is_torchs_error():
    for index in (0, 2, 4):  # the input, up's weight and bias
        block = Gated("apart", (5,), (6, 8, 4), memory="low")
        leaf = block.leaves[index]
        y = block.call()
        with torch.no_grad():
            leaf.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, [block.down], block.g)


# --- a layer after linear_glu keeps nothing more -------------------------------------------------


@device_param
@form_param
def test_bytes_of_a_pair(form, device):
    for dtype in DTYPES:
        hidden = 5 * 7 * 24 * dtype.itemsize
        assert kept_bytes(Pair(form, dtype, device, "default")) == 3 * hidden
        assert kept_bytes(Pair(form, dtype, device)) == 2 * hidden
        # which nobody reads, so that the default keeps it neither
        assert kept_bytes(Pair(form, dtype, device, wanted="frozen down")) == 2 * hidden


@device_param
@pytest.mark.parametrize("form", FORMS)
@dtype_param
def test_the_output_again_has_the_same_bits(dtype, form, device):
    for wanted in ("all", "frozen down", "frozen gate and up"):
        results = []
        for memory, on in (("default", True), ("low", True), ("low", False)):
            with tfl.handover(on):
                results.append(Pair(form, dtype, device, memory, wanted).results())
        assert_bits(results[0], results[1], wanted)
        assert_bits(results[0], results[2], wanted)


def test_the_output_comes_with_the_pass_that_is_handed_over():
    for on, again in ((True, 0), (False, 1)):
        with tfl.handover(on), tfl.explain() as report:
            Pair("apart", torch.float64, "cpu").results()
        names = [call.operator for call in report.calls]
        assert names.count("_glu") == 1 + again, names
        assert names.count("_glu_backward") == 1, names
        assert any(call.handover == HANDED for call in report.calls) == on


def test_an_output_that_was_written_to_is_kept():
    pair = Pair("apart", torch.float64, "cpu")
    results = []
    for call in (pair.glu.call, pair.glu.eager):
        h = call().mul_(2)
        leaves = [*pair.glu.leaves, pair.down]
        results.append(torch.autograd.grad(fused.linear(h, pair.down).sin().sum(), leaves))
    assert_same(*results)


# --- fuse_ --------------------------------------------------------------------------------------


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(6, 8), nn.Linear(6, 8)
        self.down, self.act = nn.Linear(8, 6), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class AndOn(Apart):
    """With an activation after it, so that the layer is one call with that."""

    def forward(self, x):
        return F.relu(self.down(self.act(self.gate(x)) * self.up(x)))


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(up * F.gelu(gate))


@pytest.mark.parametrize(
    "cls, default, low", [(Apart, 16, 8), (Chunked, 16, 16), (AndOn, 24 + 6, 16 + 4)]
)
def test_fuse_(cls, default, low):
    """In elements a row. ReLU keeps bits, 16 bytes of them."""
    x = torch.randn(5, 6)
    plain = cls()
    fused_default, fused_low = copy.deepcopy(plain), copy.deepcopy(plain)
    assert len(tfl.fuse_(fused_default).fused) == len(tfl.fuse_(fused_low, memory="low").fused)
    assert kept_bytes(lambda: fused_default(x)) == 4 * 5 * default
    for model in (fused_low, copy.deepcopy(fused_low)):
        assert kept_bytes(partial(model, x)) == 4 * 5 * low
        y, want = model(x), plain(x)
        assert_same([y, *grads(model, y)], [want, *grads(plain, want)])
    tfl.unfuse_(fused_low)
    assert kept_bytes(lambda: fused_low(x)) == kept_bytes(lambda: plain(x))


def grads(model, y):
    return torch.autograd.grad(y.sin().sum(), [*model.parameters()])


# --- layers, errors, compilers ------------------------------------------------------------------


def test_the_layer():
    block = tfl.FusedGatedMLP(6, 8, memory="low")
    linears = (block.gate_proj, block.up_proj, block.down_proj)
    taken_over = tfl.FusedGatedMLP.from_modules(*linears, memory="low")
    x = torch.randn(5, 6)
    for other in (taken_over, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other.memory == "low" and repr(other).count("memory='low'") == 1
        assert kept_bytes(partial(other, x)) == 4 * 5 * 8
        assert_bits([torch.jit.script(other)(x)], [block(x)])
    default = tfl.FusedGatedMLP(6, 8)
    assert "memory" not in repr(default)
    assert kept_bytes(lambda: default(x)) == 2 * 4 * 5 * 8


def test_wrong_values():
    x, w = torch.randn(3, 4), torch.randn(6, 4)
    down, plain = torch.randn(2, 6), nn.Linear(2, 2)
    for function in (tfl.linear_glu, fused.linear_glu):
        with pytest.raises(ValueError, match=re.escape("linear_glu: memory must be 'default' or")):
            function(x, w, w, memory="less")
    for function in (tfl.gated_mlp, fused.gated_mlp):
        with pytest.raises(ValueError, match=re.escape("gated_mlp: memory must be 'default' or")):
            function(x, w, w, down, memory="less")
    with pytest.raises(ValueError, match=r"FusedGatedMLP: memory must be .*got 'less'"):
        tfl.FusedGatedMLP(2, 2, memory="less")
    with pytest.raises(ValueError, match=r"from_modules: memory must be .*got 'less'"):
        tfl.FusedGatedMLP.from_modules(plain, plain, plain, memory="less")


class Network(nn.Module):
    """Both: a block, and a gated layer with another after it."""

    def __init__(self, memory):
        super().__init__()
        torch.manual_seed(0)
        self.block = tfl.FusedGatedMLP(6, 8, bias=True, dtype=torch.float64, memory=memory)
        self.last = nn.Linear(6, 10, dtype=torch.float64)
        self.memory = memory

    def forward(self, x):
        gate, up = self.last.weight.chunk(2)
        h = tfl.linear_glu(self.block(x), gate, up, activation="gelu_tanh", memory=self.memory)
        return tfl.linear(h, gate[:, :5])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch._dynamo.reset()
    x = torch.randn(5, 6, dtype=torch.float64)
    low, default = Network("low"), Network("default")

    def grads(model, y):
        return [y, *torch.autograd.grad(y.sin().sum(), [*model.block.parameters()])]

    want = grads(default, default(x))
    assert_same(grads(low, torch.compile(low, backend=backend, fullgraph=True)(x)), want)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        low(x).sin().sum().backward()
    assert_same([p.grad for p in low.block.parameters()], want[1:])
    torch._dynamo.reset()
