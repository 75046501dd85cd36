"""Which layers and chains the pass over compiled graphs finds, and which it leaves alone."""

import operator

import pytest
import torch
import torch.nn.functional as F
from fusion import chain, check, fresh_dynamo, tanh_formula, tensors  # noqa: F401
from helpers import one_thread  # noqa: F401

import torch_fused_linear as tfl
from torch_fused_linear.graph.fusion_pass import FusionPass


def turned(x):
    return x.transpose(0, 1)


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
    "ATen": lambda x, w, b: torch.ops.aten.relu.default(torch.ops.aten.linear.default(x, w, b)),
}
FLAT_LAYERS = {
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()).relu(),
    "addmm, a method": lambda x, w, b: b.addmm(x, turned(w)).relu(),
    "addmm of a matrix as it is": lambda x, w, b: torch.addmm(b, x, w.reshape(6, 8)).relu(),
    "mm": lambda x, w, b: torch.mm(x, w.t()).relu(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_and_activation(name):
    """The two GELUs differ by far more than what is allowed here."""
    replaced = {"linear_gelu" if "gelu" in name else "linear_relu": 1}
    in_all = name in ("F.linear, F.relu", "matmul and sum", "gelu of a view", "through views")
    for lead in [(5,), (2, 3), ()] if in_all else [(2, 3)]:
        torch._dynamo.reset()
        check(LAYERS[name], tensors(*lead)[:3], **replaced)


@pytest.mark.parametrize("name", FLAT_LAYERS)
def test_layer_of_matrices(name):
    check(FLAT_LAYERS[name], tensors(5)[:3], linear_relu=1)


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
    "GELU with another constant": lambda x, w, b: (
        lambda z: 0.5 * z * (1.0 + torch.tanh(0.8 * (z + 0.044715 * z.pow(3.0))))
    )(x @ w.t()),
    "no activation": lambda x, w, b: F.linear(x, w, b),
    "a scaled bias": lambda x, w, b: torch.addmm(b, x, w.t(), beta=2).relu(),
    "a bias for every row": lambda x, w, b: torch.addmm(b.expand(5, 8), x, w.t()).relu(),
    "one number for a bias": lambda x, w, b: (x @ w.t() + b[:1]).relu(),
    "a scaled sum": lambda x, w, b: torch.add(x @ w.t(), b, alpha=2).relu(),
    "a batch of products": lambda x, w, b: torch.bmm(x[None], w.t()[None]).relu(),
    "a weight for each batch": lambda x, w, b: (x @ w.t().expand(2, 6, 8)).relu(),
    "a vector for a weight": lambda x, w, b: F.linear(x, w[0]).relu(),
}


@pytest.mark.parametrize("name", NOT_LAYERS)
def test_what_is_no_layer_is_left_alone(name):
    check(NOT_LAYERS[name], tensors(5)[:3])


def test_other_dtypes_are_left_alone():
    check(LAYERS["F.linear, F.relu"], tensors(5, dtype=torch.int64)[:3])


def test_tensor_subclasses_are_left_alone():
    from torch.testing._internal.two_tensor import TwoTensor

    x, w, b, *_ = (TwoTensor(t.detach(), t.detach().clone()) for t in tensors(5))
    backend = tfl.compile_backend("aot_eager")
    compiled = torch.compile(LAYERS["F.linear, F.relu"], backend=backend)
    torch.testing.assert_close(compiled(x, w, b).a, F.relu(F.linear(x, w, b)).a)
    assert not backend.replaced


# --- chains --------------------------------------------------------------------------------------


def hidden_used(x, w, b, v, c):
    hidden = F.relu(F.linear(x, w, b))
    return F.linear(hidden, v, c).sum() + hidden.sum()


def hidden_is_the_weight(x, w, b, v, c):
    hidden = F.relu(F.linear(x, w, b))
    return F.linear(hidden, hidden)


def chain_of_a_chain(x, w, b, v, c):
    """The second begins at what the first gives, which something else uses as well."""
    first = F.relu(F.linear(chain(x, w, b, v, c), w, b).relu())
    return (
        chain(first[..., :6] + 1, w, b, v, c) + F.linear(F.relu(F.linear(first, v, c)), w)[..., :6]
    )


def gives_weights(x, w, b, v, c):
    """The second layer's weight comes from a first one's result."""
    weight = F.relu(F.linear(v, w.t(), c))  # [6, 6]
    return F.relu(F.linear(x, weight))


def under_different_modes(x, w, b, v, c):
    with torch.no_grad():
        hidden = F.relu(F.linear(x, w, b))
    return F.linear(hidden, v, c)


CHAINS = {
    "two": (chain, {"mlp": 1}),
    "no bias": (lambda x, w, b, v, c: F.linear(F.gelu(F.linear(x, w)), v), {"mlp": 1}),
    "through dropout that does nothing": (
        lambda x, w, b, v, c: F.linear(F.dropout(F.relu(x @ w.t()), 0.5, training=False), v),
        {"mlp": 1},
    ),
    "three with shared weights": (
        lambda x, w, b, v, c: F.linear(chain(x, w, b, v, c).relu(), w, b),
        {"mlp": 1},
    ),
    "an activation behind": (lambda *args: chain(*args).relu(), {"mlp": 1}),
    "two activations": (
        lambda x, w, b, v, c: F.linear(F.gelu(chain(x, w, b, v, c)), w),
        {"linear_relu": 1, "mlp": 1},
    ),
    "reshaped and back": (
        lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b).view(-1)).view(5, 8), v, c),
        {"mlp": 1},
    ),
    "other rows behind": (
        lambda x, w, b, v, c: F.linear(F.linear(x, w, b).relu().view(5, 1, 8), v, c),
        {"linear_relu": 1},
    ),
    "other features behind": (
        lambda x, w, b, v, c: F.linear(F.linear(x, w, b).relu().view(10, 4), v[:, :4], c),
        {"linear_relu": 1},
    ),
    "dropout": (
        lambda x, w, b, v, c: F.linear(F.dropout(F.linear(x, w, b).relu(), 0.5), v, c),
        {"linear_relu": 1},
    ),
    "our own layers": (
        lambda x, w, b, v, c: tfl.linear(tfl.linear_relu(x, w, b), v, c),
        {"mlp": 1},
    ),
    "our own activation behind": (
        lambda x, w, b, v, c: tfl.linear_gelu(tfl.linear_gelu(x, w, b), v, c),
        {"mlp": 1},
    ),
    "our own ReLU behind": (
        lambda x, w, b, v, c: tfl.linear_relu(tfl.linear_relu(x, w, b), v, c),
        {"mlp": 1},
    ),
    "our own layer alone": (lambda x, w, b, v, c: tfl.linear_relu(x, w, b).sin(), {}),
    "the hidden tensor is used": (hidden_used, {"linear_relu": 1}),
    "the hidden tensor is the weight, too": (hidden_is_the_weight, {"linear_relu": 1}),
    "chains of chains": (chain_of_a_chain, {"mlp": 3, "linear_relu": 1}),
    "results as weights": (gives_weights, {"linear_relu": 2}),
    "layers under different modes": (under_different_modes, {"linear_relu": 1}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain(name):
    function, replaced = CHAINS[name]
    check(function, tensors(5), **replaced)


def calls_of_chain(function):
    """What is left in the graph of a function that becomes one chain."""
    calls = []

    def record(module, _):
        calls.extend(n for n in module.graph.nodes if n.op.startswith("call"))
        return module

    check(function, tensors(5), backend=record, mlp=1)
    return calls


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


def graph_of(between, dtype=torch.float32):
    """A layer and its activation, as they are captured, and a node in between."""
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode():
        x, w, y = torch.empty(5, 6), torch.empty(8, 6), torch.empty(5, 8)
        nodes = [graph.placeholder("x"), graph.placeholder("w")]
        nodes.append(graph.call_function(F.linear, tuple(nodes)))
        between(graph)
        nodes.append(graph.call_function(F.relu, (nodes[-1],)))
        graph.output(nodes[-1])
        for node, value in zip(nodes, [x, w, y, y.to(dtype)]):
            node.meta["example_value"] = value
    return graph


def test_what_keeps_an_activation_apart():
    """An unknown call that is made for what it does; another dtype, as autocast may give."""

    def replaced(*args):
        fusion = FusionPass()
        fusion(graph_of(*args))
        return fusion.replaced

    assert replaced(lambda graph: None) == {"linear_relu": 1}
    assert replaced(lambda graph: graph.call_function(torch.get_num_threads)) == {}
    assert replaced(lambda graph: None, torch.float64) == {}
