"""Hooks, other consumers, checkpoints and more between fused layers or blocks: torch's gradients.

Each row is a situation: what is done with a stack of four layers, or of four blocks of two layers,
each one operator. Gradients and what hooks have seen are those of torch's own functions.
"""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from stacks import BLOCKS, LAYERS, MIXED, STACKS, Stack, assert_equal_eager, network
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

ACTIVE = [*(name for name in LAYERS if name != "none"), *BLOCKS]
SITUATIONS = []


def add(name: str, scenario, **options) -> None:
    """A row for layers and one for blocks, unless the options tell the activations."""
    stacks = {"": options.pop("activations")} if "activations" in options else STACKS
    for kind, activations in stacks.items():
        row = scenario, {"activations": activations, **options}
        SITUATIONS.append(pytest.param(*row, id=f"{name} {kind}".strip()))


def situation(name: str, **options):
    """Makes the function below it a row."""
    return lambda scenario: add(name, scenario, **options)


# --- hooks: on the tensor or the node of one of the layers ---------------------------------------


def watched(name: str, hook, layers=(0, 1, 2)) -> None:
    """The values that `hook(outputs, k, see)` gets count as results; a row for each layer k."""

    def scenario(stack: Stack, k: int) -> list[Tensor | None]:
        seen, outputs = [], stack.outputs()
        hook(outputs, k, lambda *ts: seen.extend(None if t is None else t.clone() for t in ts))
        return [*stack.step(outputs[-1]), *seen]

    for k in layers:
        add(f"{name} of layer {k}", partial(scenario, k=k))


def changed_before(outputs: list[Tensor], k: int, _) -> None:
    outputs[k].grad_fn.register_prehook(lambda grads: (grads[0].cos(),))


def retained(outputs: list[Tensor], k: int, see) -> None:
    outputs[k].retain_grad()
    outputs[0].register_hook(lambda g: see(outputs[k].grad if k else g))


watched("tensor hook", lambda o, k, see: o[k].register_hook(see))
watched("changing tensor hook", lambda o, k, _: o[k].register_hook(torch.cos))
watched("retain_grad", retained)
watched("prehook of the node", changed_before, layers=(0, 1, 2, 3))
watched(
    "hook of the node",  # which gets other gradients beside that of the output
    lambda o, k, see: o[k].grad_fn.register_hook(lambda gi, go: see(*go)),
)
watched(
    "hook of several tensors",
    lambda o, _, see: torch.autograd.graph.register_multi_grad_hook(o[:2], lambda gs: see(*gs)),
    (0,),
)


@situation("hooks that were removed")  # torch keeps their empty places
def _(stack):
    outputs = stack.outputs()
    outputs[1].register_hook(lambda g: g.cos()).remove()
    outputs[2].grad_fn.register_hook(lambda *grads: None).remove()
    return stack.step(outputs[-1])


@situation("hooks on parameters")  # of DDP, FSDP and optimisers that step in the backward
def _(stack):
    seen = {}
    for k, leaf in enumerate(stack.leaves):
        leaf.register_hook(lambda g, k=k: seen.update({(k, "before"): g.clone()}))
        leaf.register_post_accumulate_grad_hook(
            lambda p, k=k: seen.update({(k, "after"): p.grad.clone()})
        )
    grads = stack.step()
    return [*grads, *(seen[key] for key in sorted(seen))]


@situation("an optimiser in the backward")  # parameters change, each after its last use
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
    form = "layers" if stack.activations == MIXED else "blocks"
    model, seen = network(form, stack.x.device, stack.fused), []
    register(model[1], lambda *ts: seen.extend(t.clone() for t in ts))
    x = stack.x.detach().requires_grad_()
    model(x).square().sum().backward()
    assert seen
    return [x.grad, *(p.grad for p in model.parameters()), *seen]


for _name, _register in (
    ("hook", lambda m, see: m.register_full_backward_hook(lambda _, gi, go: see(*gi, *go))),
    ("pre-hook", lambda m, see: m.register_full_backward_pre_hook(lambda _, go: see(*go))),
):
    add(f"full backward {_name} of a module", partial(of_modules, register=_register))


# --- what stands between two layers --------------------------------------------------------------


def with_between(change: Callable[[Tensor], Tensor]):
    def scenario(stack):
        y = stack.x
        for k in range(4):
            y = stack.layer(k, y if k == 0 else change(y))
        return stack.step(y)

    return scenario


for _name, _change in (
    ("nothing", lambda y: y),
    ("contiguous", lambda y: y.contiguous()),
    ("to the same", lambda y: y.to(y.dtype)),
    ("dropout in eval", lambda y: F.dropout(y, 0.5, training=False)),
    ("identity", nn.Identity()),
    ("no dropout", lambda y: F.dropout(y, 0.0)),
    ("same shape", lambda y: y.reshape(y.shape)),
    ("view", lambda y: y.view(y.shape)),
    ("one dimension more and less", lambda y: y.unsqueeze(0).squeeze(0)),
    ("transposed twice", lambda y: y.t().t()),
    ("clone", lambda y: y.clone()),
    ("scaled", lambda y: y * 0.5),
    ("another dtype", lambda y: y.float().double()),
    ("in place", lambda y: y.mul(1).mul_(0.5)),
    ("norm", lambda y: F.layer_norm(y, y.shape[-1:])),
):
    add(f"between: {_name}", with_between(_change))
add("between: detach", with_between(lambda y: y.detach()))


@situation("between: dropout", lead=(32,))  # the same mask on both paths
def _(stack):
    torch.manual_seed(7)
    y = stack.layer(1, stack.layer(0, stack.x))
    return stack.step(stack.layer(3, stack.layer(2, F.dropout(y, 0.5))))


@situation("fused::mlp and plain layers", widths=(4, 5, 6, 8, 8))  # other nodes
def _(stack):
    y = stack.layer(1, stack.layer(0, stack.x))
    w, b = stack.weights[2:3], stack.biases[2:3]
    y = tfl.mlp(y, w, b) if stack.fused else F.linear(y, *w, *b)
    return stack.step(F.relu(F.linear(stack.layer(3, y), stack.weights[3].t())))


@situation("a shared layer", activations=("gelu_tanh",), widths=(4, 4))  # one node each time
def _(stack):
    y = stack.x
    for _ in range(5):
        y = stack.layer(0, y)
    return stack.step(y)


# --- other roots and consumers -------------------------------------------------------------------


def asked(stack, k, leaves=True, edge=False):
    outputs = stack.outputs()
    one = torch.autograd.graph.get_gradient_edge(outputs[k]) if edge else outputs[k]
    return torch.autograd.grad(outputs[-1], [one, *(stack.leaves if leaves else [])], stack.g)


def as_an_input(stack, k):
    outputs = stack.outputs()
    outputs[k].retain_grad()  # .grad of a tensor that is no leaf warns without
    return [*stack.step(outputs[-1], inputs=[outputs[k], stack.weights[0]]), outputs[k].grad]


for _k in range(3):
    add(f"output {_k} asked alone", partial(asked, k=_k, leaves=False))
    add(f"output {_k} asked with leaves", partial(asked, k=_k))
    add(f"output {_k} asked as an edge", partial(asked, k=_k, edge=True))
    add(f"output {_k} an input of the backward", partial(as_an_input, k=_k))


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
    "fused": lambda stack, y: stack.apply("gelu_tanh", y, stack.weights[1] * 2),
    "linear": lambda stack, y: F.linear(y, stack.weights[1]),
    "sum": lambda stack, y: y.sum(),
    "view": lambda stack, y: y.view(-1)[2:],
    "index": lambda stack, y: y[1],
}
ROOTS = {
    "product": lambda stack, y, z: z * y,
    "product of sums": lambda stack, y, z: z * y.sum(),
    "torch op": lambda stack, y, z: torch.addmm(z, y, stack.weights[1]),
    "fused, other input": lambda stack, y, z: stack.apply("relu", y, z.t() @ z),
    "fused, as weight": lambda stack, y, z: stack.apply("relu", z, y),
    "fused, twice": lambda stack, y, z: stack.apply("relu", y, y),
    "fused, only as weight": lambda stack, y, z: stack.apply("none", stack.weights[1], y),
    "bias too": lambda stack, y, z: stack.apply("none", y, stack.weights[1], y),
    "only as bias": lambda stack, y, z: stack.apply("none", stack.g, stack.weights[1], y),
}
for _name in ACTIVE:
    _pair = {"activations": (_name, "none")}
    for _k in range(3):
        _label, _four = f"output {_k} a root too: {_name}", (*[_name] * 3, "none")
        add(_label, partial(a_root_too, k=_k), activations=_four)
    if _name == "glu":
        continue  # it spreads infinities, and has another weight
    for (_second, _call), _added in itertools.product(SECOND.items(), (True, False)):
        _scenario = partial(second_consumer, second=_call, added=_added)
        _label = f"second consumer {_second}, added {_added}: {_name}"
        add(_label, _scenario, **_pair)
    for _root, _make in ROOTS.items():
        _options = {**_pair, "widths": (4, 5, 5), "lead": () if "bias" in _root else (3,)}
        add(f"root {_root}: {_name}", partial(consuming_root, make=_make), **_options)


@situation("a second consumer that is not on the way")  # what does not run does not count
def _(stack):
    outputs = stack.outputs()
    other = outputs[1].cos().sum()
    grads = stack.step(outputs[-1])
    assert other.requires_grad
    return grads


# --- runs of the engine --------------------------------------------------------------------------


@situation("retain_graph")
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
    add(f"batched gradients: {_name}", batched, activations=(*[_name] * 3, "none"))


@situation("anomaly mode")
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


for _k in range(3):
    add(f"aborted at layer {_k}, then again", partial(aborted, k=_k))


class Inner(torch.autograd.Function):
    """Its backward runs another."""

    @staticmethod
    def forward(ctx, y, fused):
        ctx.fused = fused
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inner = Stack(device=grad.device, seed=1, fused=ctx.fused)
            inner.backward(inner())
        return grad * inner.biases[0].grad.sum(), None


@situation("a backward inside a backward")
def _(stack):
    y = stack.layer(1, stack.layer(0, stack.x))
    return stack.step(stack.layer(3, stack.layer(2, Inner.apply(y, stack.fused))))


@situation("the producer on another stream", cuda=True)
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


@situation("everything on a side stream", cuda=True)
def _(stack):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        stack.backward(stack())
    torch.cuda.synchronize()
    return stack.grads()


# --- saved tensors, recomputed or kept elsewhere -------------------------------------------------


def checkpointed(stack, inside, reentrant=False):
    """Reentrant: each layer is a graph of its own."""
    y = stack.x
    for k in range(4):
        call = partial(stack.layer, k)
        y = checkpoint(call, y, use_reentrant=reentrant) if inside >> k & 1 else call(y)
    return stack.step(y)


for _inside in range(16):
    add(f"layers checkpointed: {_inside:04b}", partial(checkpointed, inside=_inside))
add("layers checkpointed, reentrant", partial(checkpointed, inside=15, reentrant=True))


@situation("unpacking that computes with gradients")  # in the same state of autograd
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


@pytest.mark.parametrize("scenario, options", SITUATIONS)
def test_situation(scenario, options, device):
    options = dict(options)
    if options.pop("cuda", False) and device.type != "cuda":
        pytest.skip("of GPUs")
    assert_equal_eager(scenario, device=device, **options)
