"""Which chains of layers the pass over compiled graphs joins; what is written in between."""

import pytest
import torch
import torch.nn.functional as F
from fusion import chain, check, fresh_dynamo, tensors  # noqa: F401
from helpers import one_thread  # noqa: F401

import torch_fused_linear as tfl
from torch_fused_linear.graph.fusion_pass import FusionPass

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
}


def hidden_used(x, w, b, v, c):
    hidden = F.relu(F.linear(x, w, b))
    return F.linear(hidden, v, c).sum() + hidden.sum()


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


CHAINS["the hidden tensor is used"] = (hidden_used, {"linear_relu": 1})
CHAINS["chains of chains"] = (chain_of_a_chain, {"mlp": 3, "linear_relu": 1})
CHAINS["results as weights"] = (gives_weights, {"linear_relu": 2})


def hidden_is_the_weight(x, w, b, v, c):
    hidden = F.relu(F.linear(x, w, b))
    return F.linear(hidden, hidden)


CHAINS["the hidden tensor is the weight, too"] = (hidden_is_the_weight, {"linear_relu": 1})


@pytest.mark.parametrize("name", CHAINS)
def test_chain(name):
    function, replaced = CHAINS[name]
    check(function, tensors(5), **replaced)


def weight_written(x, w, b, v, c):
    weight = w * 1
    hidden = F.relu(F.linear(x, weight, b))
    weight.mul_(2)
    return F.linear(hidden, v, c) + weight.sum()


def input_written(x, w, b, v, c):
    x = x * 1
    hidden = F.relu(F.linear(x, w, b))
    x += 1
    return F.linear(hidden, v, c) + x


def input_set(x, w, b, v, c):
    x = x * 1
    hidden = F.relu(F.linear(x, w, b))
    x[0] = 7
    return F.linear(hidden, v, c)


def input_rectified(x, w, b, v, c):
    x = x * 1
    hidden = F.relu(F.linear(x, w, b))
    F.relu(x, inplace=True)
    return F.linear(hidden, v, c) + x


def input_dropped(x, w, b, v, c):
    x = x * 1
    hidden = F.relu(F.linear(x, w, b))
    F.dropout(x, 0.5, True, True)
    return F.linear(hidden, v, c) + x


WRITES = [weight_written, input_written, input_set, input_rectified, input_dropped]


@pytest.mark.parametrize("function", WRITES)
def test_what_is_written_in_between_is_read_before(function):
    check(function, [t.detach() for t in tensors(5)], linear_relu=1)


def test_product_and_sum_with_a_write_in_between():
    def function(x, w, b):
        w = w * 1
        z = x @ w.t()
        w.zero_()
        return F.relu(z + b)

    check(function, [t.detach() for t in tensors(5)[:3]])


def test_layers_under_different_modes_stay_apart():
    def function(x, w, b, v, c):
        with torch.no_grad():
            hidden = F.relu(F.linear(x, w, b))
        return F.linear(hidden, v, c)

    check(function, tensors(5), linear_relu=1)


def test_every_node_of_a_chain_goes():
    """Biases that are added belong to their layers, the last one's too."""
    left = []

    def record(module, _):
        left.extend(str(n.target) for n in module.graph.nodes if n.op.startswith("call"))
        return module

    def function(x, w, b, v, c):
        return F.relu(x @ w.t() + b) @ v.t() + c

    check(function, tensors(5), backend=record, mlp=1)
    assert sorted(set(left)) == ["fused.mlp.default", "t"]


@pytest.mark.parametrize("memory", ["default", "low"])
def test_a_chain_keeps_what_its_layers_were_told_of_memory(memory):
    found = []

    def record(module, _):
        found.extend(n for n in module.graph.nodes if "fused" in str(n.target))
        return module

    def function(x, w, b, v, c):
        return tfl.linear(tfl.linear_gelu(x, w, b, memory=memory), v, c)

    check(function, tensors(5), backend=record, mlp=1)
    assert [node.kwargs.get("memory", "default") for node in found] == [memory]


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
