"""Whoever looks at, changes or shares what is between two fused layers sees torch's gradients.

Each row is a situation: what is done with a stack of four layers, how many of its three gradients
are handed over all the same, and the reason that is given for one that is not.
"""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from stacks import LAYERS, NOT_OURS, OPS, Stack, assert_equal_plain, network
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

ACTIVE = [name for name in LAYERS if name != "none"]
SITUATIONS = []


def add(name: str, scenario, handed: int | None, reason: str = "", **options) -> None:
    SITUATIONS.append(pytest.param(scenario, handed, reason, options, id=name))


def situation(name: str, handed: int | None, reason: str = "", **options):
    """Makes the function below it a row."""
    return lambda scenario: add(name, scenario, handed, reason, **options)


# --- hooks: on the tensor or the node of one of the layers ---------------------------------------


def watched(name: str, hook, handed: int | None, reason: str = "", layers=(0, 1, 2)) -> None:
    """What `hook(outputs, k, see)` is shown counts as a result; a row for each layer k."""

    def scenario(stack: Stack, k: int) -> list[Tensor | None]:
        seen, outputs = [], stack.outputs()
        hook(outputs, k, lambda *ts: seen.extend(None if t is None else t.clone() for t in ts))
        return [*stack.step(outputs[-1]), *seen]

    for k in layers:
        add(f"{name} of layer {k}", partial(scenario, k=k), handed, reason)


def changed_before(outputs: list[Tensor], k: int, _) -> None:
    outputs[k].grad_fn.register_prehook(lambda grads: (grads[0].cos(),))


ON_TENSOR, ON_NODE = "a hook on the tensor", "a hook on the node"
LAST = (3,)
watched("tensor hook", lambda o, k, see: o[k].register_hook(see), 2, ON_TENSOR)
watched("changing tensor hook", lambda o, k, _: o[k].register_hook(torch.cos), 2, ON_TENSOR)
watched("retain_grad", lambda o, k, _: o[k].retain_grad(), 2, "retain_grad")
watched("prehook of the node", changed_before, 2, ON_NODE)
watched("prehook of the node", changed_before, 3, layers=LAST)  # the true gradient arrives there
watched(
    "hook of the producer's node",
    lambda o, k, see: o[k].grad_fn.register_hook(lambda gi, go: see(*gi, *go)),
    None,
    "hook",
)
watched(
    "changing hook of the node",
    lambda o, k, _: o[k].grad_fn.register_hook(lambda g, _: (g[0].cos(), *g[1:])),
    2,
    "hook",
    LAST,
)
watched(
    "hook of several tensors",
    lambda o, _, see: torch.autograd.graph.register_multi_grad_hook(o[:2], lambda gs: see(*gs)),
    1,
    ON_TENSOR,
    (0,),
)


@situation("hooks that were removed", None)  # torch keeps their empty places
def _(stack):
    outputs = stack.outputs()
    outputs[1].register_hook(lambda g: g.cos()).remove()
    outputs[2].grad_fn.register_hook(lambda *grads: None).remove()
    return stack.step(outputs[-1])


@situation("hooks on parameters", 3)  # of DDP, FSDP and optimisers that step in the backward
def _(stack):
    seen = []
    for leaf in stack.leaves:
        leaf.register_hook(lambda g: seen.append(g.clone()))
        leaf.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    return [*stack.step(), *seen]


@situation("an optimiser in the backward", 9)  # parameters change, each after its last use
def _(stack):
    def update(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for leaf in stack.leaves:
        leaf.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        stack.backward(stack())
    return [leaf.detach() for leaf in stack.leaves]


def of_modules(stack, register):
    """Nodes of the hook's own stand before and behind the layer."""
    model, seen = network(stack.x.device), []
    register(model[1], lambda *ts: seen.extend(t.clone() for t in ts))
    x = stack.x.detach().requires_grad_()
    model(x).square().sum().backward()
    assert seen
    return [x.grad, *(p.grad for p in model.parameters()), *seen]


for _name, _register in (
    ("hook", lambda m, see: m.register_full_backward_hook(lambda _, gi, go: see(*gi, *go))),
    ("pre-hook", lambda m, see: m.register_full_backward_pre_hook(lambda _, go: see(*go))),
):
    add(f"full backward {_name} of a module", partial(of_modules, register=_register), 1, NOT_OURS)


# --- what stands between two layers --------------------------------------------------------------


def with_between(change: Callable[[Tensor], Tensor]):
    def scenario(stack):
        y = stack.x
        for k in range(4):
            y = stack.layer(k, y if k == 0 else change(y))
        return stack.step(y)

    return scenario


for _name, _change, _handed in (
    ("nothing", lambda y: y, 3),
    ("contiguous", lambda y: y.contiguous(), 3),
    ("to the same", lambda y: y.to(y.dtype), 3),
    ("dropout in eval", lambda y: F.dropout(y, 0.5, training=False), 3),
    ("identity", nn.Identity(), 3),
    ("no dropout", lambda y: F.dropout(y, 0.0), None),
    ("same shape", lambda y: y.reshape(y.shape), 0),
    ("view", lambda y: y.view(y.shape), 0),
    ("one dimension more and less", lambda y: y.unsqueeze(0).squeeze(0), 0),
    ("transposed twice", lambda y: y.t().t(), 0),
    ("clone", lambda y: y.clone(), 0),
    ("scaled", lambda y: y * 0.5, 0),
    ("another dtype", lambda y: y.float().double(), 0),
    ("in place", lambda y: y.mul(1).mul_(0.5), 0),
    ("norm", lambda y: F.layer_norm(y, y.shape[-1:]), 0),
):
    add(f"between: {_name}", with_between(_change), _handed, NOT_OURS if _handed == 0 else "")
add("between: detach", with_between(lambda y: y.detach()), 0)


@situation("between: dropout", 2, NOT_OURS, lead=(32,))  # the same mask on both paths
def _(stack):
    torch.manual_seed(7)
    y = stack.layer(1, stack.layer(0, stack.x))
    return stack.step(stack.layer(3, stack.layer(2, F.dropout(y, 0.5))))


@situation("fused::mlp and plain layers", 1, NOT_OURS, widths=(4, 5, 6, 8, 8))  # other nodes
def _(stack):
    y = stack.layer(1, stack.layer(0, stack.x))
    y = tfl.mlp(y, stack.weights[2:3], stack.biases[2:3])
    return stack.step(F.relu(F.linear(stack.layer(3, y), stack.weights[3].t())))


@situation("a shared layer", 4, activations=("gelu_tanh",), widths=(4, 4))  # one node each time
def _(stack):
    y = stack.x
    for _ in range(5):
        y = stack.layer(0, y)
    return stack.step(y)


# --- other roots and consumers -------------------------------------------------------------------

ASKED = "its gradient was asked for"


def asked(stack, k, leaves=True, edge=False):
    outputs = stack.outputs()
    one = torch.autograd.graph.get_gradient_edge(outputs[k]) if edge else outputs[k]
    return torch.autograd.grad(outputs[-1], [one, *(stack.leaves if leaves else [])], stack.g)


def as_an_input(stack, k):
    outputs = stack.outputs()
    outputs[k].retain_grad()  # .grad of a tensor that is no leaf warns without
    return [*stack.step(outputs[-1], inputs=[outputs[k], stack.weights[0]]), outputs[k].grad]


for _k in range(3):
    add(f"output {_k} asked alone", partial(asked, k=_k, leaves=False), 2 - _k)
    add(f"output {_k} asked with leaves", partial(asked, k=_k), 2, ASKED)
    add(f"output {_k} asked as an edge", partial(asked, k=_k, edge=True), 2, ASKED)
    add(f"output {_k} an input of the backward", partial(as_an_input, k=_k), 2)


def a_root_too(stack, k):
    outputs = stack.outputs()
    return stack.step(outputs[-1], outputs[k], gradients=[stack.g, outputs[k].detach().cos()])


def second_consumer(stack, second, added):
    """Added to the result, or a root of its own."""
    y = stack.layer(0, stack.x)
    extra, out = second(stack, y), stack.layer(1, y)
    if not added:
        return stack.step(out, extra)
    (out.cos().sum() + extra.sin().sum()).backward()
    return stack.grads()


def consuming_root(stack, make):
    """A root that takes the first layer's output itself."""
    y = stack.layer(0, stack.x)
    out = make(stack, y, stack.layer(1, y))
    return stack.step(out, gradients=[out.detach().cos()])


SECOND = {
    "fused": lambda stack, y: OPS["gelu_tanh"].call(y, stack.weights[1] * 2),
    "linear": lambda stack, y: F.linear(y, stack.weights[1]),
    "sum": lambda stack, y: y.sum(),
    "view": lambda stack, y: y.view(-1)[2:],
    "index": lambda stack, y: y[1],
}
ROOTS = {
    "product": lambda stack, y, z: z * y,
    "product of sums": lambda stack, y, z: z * y.sum(),
    "torch op": lambda stack, y, z: torch.addmm(z, y, stack.weights[1]),
    "fused, other input": lambda stack, y, z: OPS["relu"].call(y, z.t() @ z),
    "fused, as weight": lambda stack, y, z: OPS["relu"].call(z, y),
    "fused, twice": lambda stack, y, z: OPS["relu"].call(y, y),
    "fused, only as weight": lambda stack, y, z: OPS["none"].call(stack.weights[1], y),
    "bias too": lambda stack, y, z: OPS["none"].call(y, stack.weights[1], y),
    "only as bias": lambda stack, y, z: OPS["none"].call(stack.g, stack.weights[1], y),
}
for _name in ACTIVE:
    _pair = {"activations": (_name, "none")}
    for _k in range(3):
        _label, _four = f"output {_k} a root too: {_name}", (*[_name] * 3, "none")
        add(_label, partial(a_root_too, k=_k), 2, "another consumer", activations=_four)
    if _name == "glu":
        continue  # it spreads infinities, and has another weight
    for (_second, _call), _added in itertools.product(SECOND.items(), (True, False)):
        _scenario = partial(second_consumer, second=_call, added=_added)
        _label = f"second consumer {_second}, added {_added}: {_name}"
        add(_label, _scenario, 0, "another consumer", **_pair)
    for _root, _make in ROOTS.items():
        _options = {**_pair, "widths": (4, 5, 5), "lead": () if "bias" in _root else (3,)}
        add(f"root {_root}: {_name}", partial(consuming_root, make=_make), 0, **_options)


@situation("a second consumer that is not on the way", 3)  # what does not run does not count
def _(stack):
    outputs = stack.outputs()
    other = outputs[1].cos().sum()
    grads = stack.step(outputs[-1])
    assert other.requires_grad
    return grads


# --- runs of the engine --------------------------------------------------------------------------


@situation("retain_graph", 12)
def _(stack):
    y = stack()
    for factor in (1, -2, 3):
        stack.backward(y, gradients=[factor * stack.g], retain_graph=True)
    return stack.step(y)


def batched(stack):
    """The engine runs inside vmap."""
    g = torch.stack([stack.g, -stack.g, stack.g.square()])
    return torch.autograd.grad(stack(), stack.leaves, g, is_grads_batched=True)


for _name in ACTIVE:
    add(f"batched gradients: {_name}", batched, 3, activations=(*[_name] * 3, "none"))


@situation("anomaly mode", 0, "anomaly mode")
def _(stack):
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return stack.step()


def aborted(stack, k):
    """A hook raises in the middle; nothing of that run shows in the next."""
    outputs, armed = stack.outputs(), [True]

    def hook(_):
        if armed:
            raise KeyError("on purpose")

    stack.weights[k].register_hook(hook)
    with pytest.raises(KeyError, match="on purpose"):
        stack.backward(outputs[-1], retain_graph=True)
    armed.clear()
    for leaf in stack.leaves:
        leaf.grad = None
    return stack.step(outputs[-1])


for _k in range(3):  # three in the second run; in the first, as many as were left before the hook
    add(f"aborted at layer {_k}, then again", partial(aborted, k=_k), 3 + min(3, 4 - _k))


class Inner(torch.autograd.Function):
    """Its backward runs another, with an id of its own; the outer one's notes wait."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inner = Stack(device=grad.device, seed=1)
            inner.backward(inner())
        return grad * inner.biases[0].grad.sum()


@situation("a backward inside a backward", 1 + 3 + 1)
def _(stack):
    y = stack.layer(1, stack.layer(0, stack.x))
    return stack.step(stack.layer(3, stack.layer(2, Inner.apply(y))))


@situation("the producer on another stream", 2, "another stream", cuda=True)
def _(stack):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = stack.layer(1, stack.layer(0, stack.x))
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    stack.backward(stack.layer(3, stack.layer(2, y)))
    torch.cuda.synchronize()
    return stack.grads()


@situation("everything on a side stream", 3, cuda=True)
def _(stack):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stack.backward(stack())
    torch.cuda.synchronize()
    return stack.grads()


# --- saved tensors, recomputed or kept elsewhere -------------------------------------------------


def checkpointed(stack, inside, reentrant=False):
    """Non-reentrant: the layers stay neighbours, and the consumer's step may be what has the
    producer recomputed. Reentrant: each layer is a graph of its own."""
    y = stack.x
    for k in range(4):
        call = partial(stack.layer, k)
        y = checkpoint(call, y, use_reentrant=reentrant) if inside >> k & 1 else call(y)
    return stack.step(y)


for _inside in range(16):
    add(f"layers checkpointed: {_inside:04b}", partial(checkpointed, inside=_inside), 3)
add("layers checkpointed, reentrant", partial(checkpointed, inside=15, reentrant=True), 0)


@situation("unpacking that computes with gradients", 3)  # in the same state of autograd
def _(stack):
    states = []

    def unpack(tensor):
        with torch.enable_grad():
            leaf = tensor.detach().clone().requires_grad_(tensor.is_floating_point())
            states.append((leaf * 2).requires_grad)
        return tensor

    with saved_tensors_hooks(lambda t: t, unpack):
        y = stack()
    grads = stack.step(y)
    assert states and all(states), "autograd was switched off while unpacking"
    return grads


# --- the rows, run -------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario, handed, reason, options", SITUATIONS)
def test_situation(scenario, handed, reason, options, device):
    options = dict(options)
    if options.pop("cuda", False) and device.type != "cuda":
        pytest.skip("of GPUs")
    assert_equal_plain(scenario, handed, reason, device=device, **options)
