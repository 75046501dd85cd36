"""The pass over compiled graphs finds layers, chains, gated layers and blocks, convolutions."""

import operator
from functools import partial
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from fusion import chain, chain_of, check, conv_relu, images, results, tanh_formula, tensors
from operators import ODD
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torch_fused_linear as tfl
from torch_fused_linear.graph import matching_conv
from torch_fused_linear.graph.fusion_pass import FusionPass

# --- layers --------------------------------------------------------------------------------------


@torch.no_grad()
def turned(w):
    return w.t()


LAYERS = {
    "F.linear, F.relu": lambda x, w, b: F.relu(F.linear(x, w, b)),
    "torch.relu": lambda x, w, b: torch.relu(F.linear(x, w, b)),
    "method": lambda x, w, b: F.linear(x, w, b).relu(),
    "in place": lambda x, w, b: F.linear(x, w, b).relu_(),
    "in place, a function": lambda x, w, b: torch.relu_(F.linear(x, w, b)),
    "inplace=True": lambda x, w, b: F.relu(F.linear(x, w, b), inplace=True),
    "keywords": lambda x, w, b: F.relu(input=F.linear(bias=b, weight=w, input=x)),
    "no bias": lambda x, w, b: F.relu(F.linear(x, w)),
    "matmul": lambda x, w, b: F.relu(x @ w.t()),
    "matmul, keywords": lambda x, w, b: F.relu(x @ torch.t(input=w)),
    "matmul and sum": lambda x, w, b: F.relu(torch.matmul(x, w.T) + b),
    "sum and matmul": lambda x, w, b: F.relu(torch.add(b, x.matmul(w.mT))),
    "sum in place": lambda x, w, b: F.relu(operator.iadd(x @ w.permute(1, 0), b)),
    "linear and sum": lambda x, w, b: F.relu(F.linear(x, w) + b),
    "gelu": lambda x, w, b: F.gelu(F.linear(x, w, b)),
    "gelu tanh": lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
    "gelu written out": lambda x, w, b: tanh_formula(F.linear(x, w, b)),
    "gelu of a view": lambda x, w, b: tanh_formula(F.linear(x, w, b).flatten()),
    "through views": lambda x, w, b: F.linear(x, w, b).unsqueeze(0).reshape(-1).relu(),
    "dropout that does nothing": lambda x, w, b: F.dropout(F.linear(x, w, b), 0.0).relu(),
    "our own linear": lambda x, w, b: F.relu(tfl.linear(x, w, b)),
    "turned without gradients": lambda x, w, b: F.relu(x @ turned(w)) * w.sum(),
    "turned first": lambda x, w, b: (lambda v: F.relu(x @ (v.t(), v.t_())[0]))(w[:6] + 0),
    "ATen": lambda x, w, b: torch.ops.aten.relu.default(torch.ops.aten.linear.default(x, w, b)),
}
FLAT_LAYERS = {
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()).relu(),
    "addmm, a method": lambda x, w, b: b.addmm(x, w.transpose(0, 1)).relu(),
    "addmm of a matrix as it is": lambda x, w, b: torch.addmm(b, x, w.reshape(6, 8)).relu(),
    "mm": lambda x, w, b: torch.mm(x, w.t()).relu(),
}


def under_another_mode(x, w, b):
    z = F.linear(x, w, b)
    with torch.no_grad():
        y = F.relu(z)
    return y + x.sum()


def widened_by_autocast(x, w, b):
    """The product is bf16 there, the sum with an fp32 bias fp32: no layer gives that."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.relu(x @ w.t() + b)


NOT_LAYERS = {
    "the pre-activation is used": lambda x, w, b: (lambda z: F.relu(z) + z)(F.linear(x, w, b)),
    "the activation runs without gradients": under_another_mode,
    "the sum is wider than the product": widened_by_autocast,
    "the bits are read as integers": lambda x, w, b: F.linear(x, w, b).view(torch.int32).relu(),
    "another activation": lambda x, w, b: F.relu6(F.linear(x, w, b)),
    "GELU by the sigmoid": lambda x, w, b: (lambda z: z * torch.sigmoid(1.702 * z))(x @ w.t()),
    "GELU with another constant": lambda x, w, b: tanh_formula(x @ w.t(), 0.8),
    "a tanh that is kept": lambda x, w, b: tanh_formula(F.linear(x.data, w.data), out=x.new(5, 8)),
    "a bias of another dtype": lambda x, w, b: F.linear(x.expand(2, 5, 6), w, b.double()).relu(),
    "no activation": lambda x, w, b: F.linear(x, w, b),
    "a scaled bias": lambda x, w, b: torch.addmm(b, x, w.t(), beta=2).relu(),
    "a bias for every row": lambda x, w, b: torch.addmm(b.expand(5, 8), x, w.t()).relu(),
    "one number for a bias": lambda x, w, b: (x @ w.t() + b[:1]).relu(),
    "a scaled sum": lambda x, w, b: torch.add(x @ w.t(), b, alpha=2).relu(),
    "a batch of products": lambda x, w, b: torch.bmm(x[None], w.t()[None]).relu(),
    "a weight for each batch": lambda x, w, b: (x @ w.t().expand(2, 6, 8)).relu(),
    "a vector for a weight": lambda x, w, b: F.linear(x, w[0]).relu(),
}


# --- chains --------------------------------------------------------------------------------------


def chain_of_a_chain(x, w, b, v, c):
    """The second begins at what the first gives, which something else uses as well."""
    first = F.relu(F.linear(chain(x, w, b, v, c), w, b).relu())
    second = chain(first[..., :6] + 1, w, b, v, c)
    return second + F.linear(F.relu(F.linear(first, v, c)), w)[..., :6]


def under_different_modes(x, w, b, v, c):
    with torch.no_grad():
        hidden = F.relu(F.linear(x, w, b))
    return F.linear(hidden, v, c)


MLP = {
    "two": chain,
    "no bias": lambda x, w, b, v, c: F.linear(F.gelu(F.linear(x, w)), v),
    "through dropout that does nothing": chain_of(lambda z: F.dropout(z.relu(), training=False)),
    "three, shared weights": lambda x, w, b, v, c: F.linear(chain(x, w, b, v, c).relu(), w, b),
    "an activation behind": lambda *args: chain(*args).relu(),
    "reshaped and back": chain_of(lambda z: F.relu(z.view(-1)).view(5, 8)),
    "our own layers": lambda x, w, b, v, c: tfl.linear(tfl.linear_relu(x, w, b), v, c),
    "our own GELU behind": lambda x, w, b, v, c: tfl.linear_gelu(tfl.linear_gelu(x, w, b), v, c),
    "our own ReLU behind": lambda x, w, b, v, c: tfl.linear_relu(tfl.linear_relu(x, w, b), v, c),
}
FIRST_ALONE = {
    "other rows behind": chain_of(lambda z: z.relu().view(5, 1, 8)),
    "other features behind": lambda x, w, b, v, c: F.linear(
        F.linear(x, w, b).relu().view(10, 4), v[:, :4], c
    ),
    "dropout": chain_of(lambda z: F.dropout(z.relu(), 0.5)),
    "the hidden tensor is used": lambda x, w, b, v, c: (
        lambda hidden: F.linear(hidden, v, c).sum() + hidden.sum()
    )(F.relu(F.linear(x, w, b))),
    "its own weight": lambda x, w, b, v, c: (lambda h: F.linear(h, h))(F.relu(F.linear(x, w, b))),
    "layers under different modes": under_different_modes,
}
MIXED = {
    "two activations": (
        lambda x, w, b, v, c: F.linear(F.gelu(chain(x, w, b, v, c)), w),
        {"linear_relu": 1, "mlp": 1},
    ),
    "our own layer alone": (lambda x, w, b, v, c: tfl.linear_relu(x, w, b).sin(), {}),
    "chains of chains": (chain_of_a_chain, {"mlp": 3, "linear_relu": 1}),
    "results as weights": (
        lambda x, w, b, v, c: F.relu(F.linear(x, F.relu(F.linear(v, w.t(), c)))),
        {"linear_relu": 2},
    ),
}
CHAINS = {name: (function, {"mlp": 1}) for name, function in MLP.items()} | MIXED
CHAINS |= {name: (function, {"linear_relu": 1}) for name, function in FIRST_ALONE.items()}


# --- gated layers and blocks ----------------------------------------------------------------------

GATES = {"silu": F.silu, "relu": torch.relu, "gelu_tanh": nn.GELU("tanh"), "gelu_erf": F.gelu}


class Block(nn.Module):
    def __init__(self, form, act=F.silu, bias=True):
        super().__init__()
        self.gate, self.up = nn.Linear(6, 8, bias), nn.Linear(6, 8, bias)
        self.both, self.down = nn.Linear(6, 16, bias), nn.Linear(8, 5, bias)
        self.form, self.act = form, act

    def forward(self, x):
        return self.form(self, x)


def chunks(m, x, number=2, dim=-1):
    return m.both(x).chunk(number, dim)


def product_first(m, x):
    return m.down(m.act(m.gate(x)) * m.up(x))


def chunked(m, x):
    return (lambda gate, up: m.down(m.act(gate) * up))(*chunks(m, x))


BLOCKS = {
    "product first": product_first,
    "up first": lambda m, x: (lambda up: m.down(up * m.act(m.gate(x))))(m.up(x)),
    "chunked": chunked,
    "chunked, up first": lambda m, x: (lambda up, gate: m.down(up * m.act(gate)))(
        *torch.chunk(m.both(x), 2, dim=2)
    ),
    "ours inside": lambda m, x: m.down(tfl.linear_silu(x, m.gate.weight, m.gate.bias) * m.up(x)),
}
NO_BLOCKS = {
    "a layer alone": (lambda m, x: (m.act(m.gate(x)) * m.up(x)).tanh(), {"linear_glu": 1}),
    "used twice": (
        lambda m, x: (lambda h: m.down(h) + h.sum())(m.act(m.gate(x)) * m.up(x)),
        {"linear_glu": 1},
    ),
    "a gate read elsewhere": (
        lambda m, x: (lambda gate: m.down(m.act(gate) * m.up(x)) + gate.sum())(m.gate(x)),
        {},
    ),
    "another input": (lambda m, x: m.down(m.act(m.gate(x)) * m.up(x + 1)), {"linear_silu": 1}),
    "three chunks": (lambda m, x: (lambda a, b, _: m.act(a) * b)(*chunks(m, x, 3)), {}),
    "chunks of rows": (lambda m, x: (lambda a, b: m.act(a) * b)(*chunks(m, x, dim=0)), {}),
    "two activations": (lambda m, x: F.silu(tfl.linear_relu(x, m.gate.weight)) * m.up(x), {}),
    "the same half": (lambda m, x: (lambda a, b: m.act(a) * a + b)(*chunks(m, x)), {}),
}


# --- convolutions --------------------------------------------------------------------------------

# The ways to write ReLU are those behind linear layers.
SPELLINGS = {
    "F": conv_relu,
    "torch.relu_": lambda x, w, b: torch.relu_(torch.conv2d(x, w, b)),
    "in-place methods": lambda x, w, b: torch.conv2d(x, w, b).relu_(),
    "ATen": lambda x, w, b: torch.ops.aten.relu(torch.ops.aten.conv2d(x, w, b)),
    "by name": lambda x, w, b: F.relu(input=F.conv2d(weight=w, input=x, bias=b, padding=1)),
    "no bias": lambda x, w, b: F.relu(F.conv2d(x, w)) + b[:, None, None],
    "all options": lambda x, w, b: F.relu(F.conv2d(x, w[:, :2], b, (2, 1), [1, 2], 2, 2)),
    "one number in a list": lambda x, w, b: F.relu(F.conv2d(x, w, b, [2], (1,))),
    "valid": lambda x, w, b: F.relu(F.conv2d(x, w, b, padding="valid")),
    "same": lambda x, w, b: F.relu(F.conv2d(x, w, b, padding="same", dilation=(2, 1))),
    "weight and image in one": lambda x, w, b: F.relu(F.conv2d(w, w, b)) + x.sum(),
}
MODULES = {
    # The image has its padding already; the convolution itself has none.
    "reflect": (
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.ReLU()),
        {"conv2d_relu": 1},
    ),
    "two": (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.ReLU(True)),
        {"conv2d_relu": 2},
    ),
    "ours": (tfl.FusedConv2dReLU(4, 6, 3), {}),
    "normalised": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), {}),
    "1-D": (nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 3), nn.ReLU()), {}),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.ReLU()), {}),
}


def under_no_grad_in_part(x, w, b):
    with torch.no_grad():
        z = F.conv2d(x, w, b)
    return F.relu(z) * b.sum() * w.sum() * x.sum()


def written_before_relu(x, w, b):
    z = F.conv2d(x, w, b)
    z.mul_(-1)
    return F.relu(z)


def relu_outside_of_autocast(x, w, b):
    """Its operand is bf16 all the same, but the mode has changed in between."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = F.conv2d(x, w, b)
    return F.relu(z)


LEFT_ALONE = {
    "a second use": lambda x, w, b: (lambda z: F.relu(z) + z)(F.conv2d(x, w, b)),
    "a second use, in place": lambda x, w, b: (lambda z: F.relu(z, True) + z)(F.conv2d(x, w, b)),
    "gradients of one part only": under_no_grad_in_part,
    "written in between": written_before_relu,
    "autocast of one part only": relu_outside_of_autocast,
    "uneven padding": lambda x, w, b: F.relu(F.conv2d(x, w[..., :2], b, padding="same")),
    "another activation": lambda x, w, b: F.gelu(F.conv2d(x, w, b)),
    "no activation": lambda x, w, b: F.conv2d(x, w, b),
    "flattened first": lambda x, w, b: F.relu(F.conv2d(x, w, b).flatten(1)),
}


# --- the rows, run -------------------------------------------------------------------------------


def flat(**options):
    return tensors(5, **options)[:3]


def vectors():
    return [torch.randn(2, 3, 6, requires_grad=True)]


IN_ALL = ("F.linear, F.relu", "matmul and sum", "gelu of a view", "through views")
TRACED, CONV = {"backend": "aot_eager"}, {"conv": True}
BLOCK, ONE = {**TRACED, "gated_mlp": 1}, {**CONV, "conv2d_relu": 1}


def rows():
    """A name, the function or what makes it, its arguments, and how: options, what is replaced."""
    for name, function in LAYERS.items():
        # the two GELUs differ by far more than what is allowed here
        how = {"linear_gelu" if "gelu" in name else "linear_relu": 1}
        for lead in [(5,), (2, 3), ()] if name in IN_ALL else [(2, 3)]:
            yield f"{name} {lead}", function, lambda lead=lead: tensors(*lead)[:3], how
    for name, function in FLAT_LAYERS.items():
        yield name, function, flat, {"linear_relu": 1}
    for name, function in NOT_LAYERS.items():
        yield name, function, flat, {}
    yield "integers", LAYERS["F.linear, F.relu"], partial(flat, dtype=torch.int64), {}
    for name, (function, how) in CHAINS.items():
        yield f"chain, {name}", function, partial(tensors, 5), how
    gated = {name: (form, BLOCK) for name, form in BLOCKS.items()} | NO_BLOCKS
    for name, (form, how) in gated.items():
        for bias in (True, False):
            yield f"gated, {name}, {bias}", partial(Block, form, bias=bias), vectors, TRACED | how
    for name, act in GATES.items():
        for form in (product_first, chunked):
            yield f"{form.__name__} {name}", partial(Block, form, act), vectors, BLOCK
    yield "dynamic tokens", partial(Block, chunked), vectors, {**BLOCK, "dynamic": True}
    for name, function in SPELLINGS.items():
        for last in (False, True) if name in ("F", "all options", "same") else (False,):
            yield f"conv, {name}, {last}", function, partial(images, 2, last=last), ONE
    for name, (model, how) in MODULES.items():
        yield f"conv, {name}", model, lambda: images(2)[:1], {**TRACED, **CONV, **how}
    for name, function in LEFT_ALONE.items():
        yield f"conv, {name}", function, partial(images, 2), CONV
    yield "conv, integers", conv_relu, partial(images, 2, dtype=torch.long), CONV


@pytest.mark.parametrize("function, make, how", [pytest.param(*r, id=n) for n, *r in rows()])
def test_patterns_that_are_replaced(function, make, how):
    check(function() if isinstance(function, partial) else function, make(), **how)


# --- more of layers and chains -------------------------------------------------------------------


def test_tensor_subclasses_are_left_alone():
    x, w, b, *_ = (TwoTensor(t.detach(), t.detach().clone()) for t in tensors(5))
    backend = tfl.compile_backend("aot_eager")
    compiled = torch.compile(LAYERS["F.linear, F.relu"], backend=backend)
    torch.testing.assert_close(compiled(x, w, b).a, F.relu(F.linear(x, w, b)).a)
    assert not backend.replaced


def calls_of_chain(function):
    """Returns the calls left in the graph of a function that becomes one chain."""
    calls = []

    def record(module, _):
        calls.extend(n for n in module.graph.nodes if n.op.startswith("call"))
        return module

    check(function, tensors(5), backend=record, mlp=1)
    return calls


def test_a_sum_between_product_and_activation_is_a_bias():
    def block(x, gate, up, down):
        hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)
        return F.linear(hidden, down, hidden)

    check(block, [torch.randn(6), *torch.randn(3, 6, 6)], linear_glu=1)


def test_every_node_of_a_chain_goes():
    """Biases that are added belong to their layers, the last one's too."""
    calls = calls_of_chain(lambda x, w, b, v, c: F.relu(x @ w.t() + b) @ v.t() + c)
    assert {str(node.target) for node in calls} == {"fused.mlp.default", "t"}


@pytest.mark.parametrize("memory", ["default", "low"])
def test_a_chain_keeps_what_its_layers_were_told_of_memory(memory):
    (node,) = calls_of_chain(
        lambda x, w, b, v, c: tfl.linear(tfl.linear_gelu(x, w, b, memory=memory), v, c)
    )
    assert node.kwargs.get("memory", "default") == memory


def replaced(*dtypes, between=lambda graph: None, reader=None):
    """In a layer and its activation, as they are captured, a node in between, and a reader."""
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode():
        x, w, y = torch.empty(5, 6), torch.empty(8, 6), torch.empty(5, 8)
        nodes = [graph.placeholder("x"), graph.placeholder("w")]
        nodes.append(graph.call_function(F.linear, tuple(nodes)))
        between(graph)
        nodes.append(graph.call_function(F.relu, (nodes[-1],)))
        nodes += [graph.call_function(reader, (nodes[-1], nodes[1]))] if reader else []
        graph.output(nodes[-1])
        for node, value, dtype in zip(nodes, [x, w, y, y, x], dtypes or 5 * [torch.float32]):
            node.meta["example_value"] = value.to(dtype)
    fusion = FusionPass()
    fusion(graph)
    return fusion.replaced


def test_patterns_that_keep_an_activation_apart():
    """An unknown call that is made for what it does; another dtype, as autocast may give."""
    assert replaced() == {"linear_relu": 1}
    assert replaced(between=lambda graph: graph.call_function(torch.get_num_threads)) == {}
    low, wide = 3 * [torch.bfloat16], torch.float32
    assert replaced(wide, wide, wide, torch.float64) == replaced(*low, wide) == {}
    assert replaced(*low, wide, low[0], reader=torch.matmul) == {"mlp": 1}  # powers, on a GPU
    assert replaced(*low, wide, low[0], reader=torch.mul) == {}
    assert replaced(*low, wide, wide, reader=torch.matmul) == {}


# --- more of convolutions ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    args = images(2, dtype=dtype)
    backend = tfl.compile_backend("eager", conv=True)
    compiled = torch.compile(conv_relu, fullgraph=True, backend=backend)
    for got, want in zip(results(compiled, args), results(conv_relu, args), strict=True):
        level = 8 * torch.finfo(dtype).eps * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=level)
    assert backend.replaced == {"conv2d_relu": 1}


def test_every_geometry():
    def function(*leaves):
        given = iter(leaves)
        return torch.cat([op.eager(*islice(given, 3)).flatten() for op in ODD.values()])

    leaves = [t for op in ODD.values() for t in op.case(dtype=torch.float32).leaves()]
    check(function, leaves, conv=True, conv2d_relu=len(ODD))


def test_a_result_of_other_strides_is_left_alone(monkeypatch):
    """Later nodes may view it, so our result must have the strides of eager's."""
    real = matching_conv._conv2d_relu
    monkeypatch.setattr(matching_conv, "_conv2d_relu", lambda *a: real(*a).contiguous())
    check(conv_relu, images(2, last=True), conv=True)


def test_only_where_it_is_asked_for():
    for backend in (tfl.compile_backend("eager"), tfl.compile_backend("eager", conv=False)):
        torch._dynamo.reset()
        torch.compile(conv_relu, backend=backend)(*images(2))
        assert not backend.replaced
    assert tfl.compile_options()["pre_grad_custom_pass"].conv is False


def test_beside_linear_layers():
    def function(x, w, b, v, c):
        hidden = F.relu(F.conv2d(F.relu(F.conv2d(x, w, b)), w.transpose(0, 1))).flatten(1)
        return F.linear(F.relu(F.linear(hidden, v, c)), v.t())

    args = [*images(2), torch.randn(5, 24, requires_grad=True), torch.randn(5).requires_grad_()]
    check(function, args, conv=True, conv2d_relu=2, mlp=1)


def test_any_size_of_batch_and_image():
    backend = tfl.compile_backend("aot_eager", conv=True)
    function = SPELLINGS["all options"]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    _, w, b = images(2)
    for size in ((2, 4, 9, 8), (3, 4, 11, 12), (5, 4, 8, 13)):
        args = [torch.randn(size, requires_grad=True), w, b]
        got, want = results(compiled, args), results(function, args)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert backend.replaced == {"conv2d_relu": 1}, "one graph for all"
