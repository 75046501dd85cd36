"""Whoever looks at, changes or shares what is between two fused layers sees torch's gradients.

Each row is a situation: what is done with a stack of four layers, how many of its three gradients
are handed over all the same, and the reason that is given for one that is not.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from stacks import LAYERS, OPS, Stack, assert_equal_plain
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_fused_linear as tfl

NOT_OURS = "the input is not a fused layer's output"
ACTIVE = [name for name in LAYERS if name != "none"]


class Situation(NamedTuple):
    scenario: Callable[[Stack], Sequence[Tensor | None]]
    handed: int | None
    reason: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)


SITUATIONS: dict[str, Situation] = {}


def situation(name: str, handed: int | None, reason: str = "", **options):
    """Makes the function below it a row."""

    def add(scenario):
        assert name not in SITUATIONS
        SITUATIONS[name] = Situation(scenario, handed, reason, options)
        return scenario

    return add


def step(stack: Stack, *roots: Tensor, **options) -> list[Tensor | None]:
    stack.backward(*roots, **options)
    return stack.grads()


# --- hooks: on the tensor or the node of one of the layers ---------------------------------------


def watched(hook, middle=(0, 1, 2)):
    """What `hook(outputs, k, see)` is shown counts as a result; for each k of its own."""

    def scenario(stack: Stack, k: int) -> list[Tensor | None]:
        seen, outputs = [], stack.outputs()
        hook(outputs, k, lambda *ts: seen.extend(None if t is None else t.clone() for t in ts))
        return [*step(stack, outputs[-1]), *seen]

    return [(f"of layer {k}", partial(scenario, k=k)) for k in middle]


def rows_of(name: str, scenarios, handed: int | None, reason: str = "", **options) -> None:
    for label, scenario in scenarios:
        SITUATIONS[f"{name} {label}"] = Situation(scenario, handed, reason, options)


ON_TENSOR, ON_NODE = "a hook on the tensor", "a hook on the node"
LAST = (3,)
rows_of("tensor hook", watched(lambda o, k, see: o[k].register_hook(see)), 2, ON_TENSOR)
rows_of(
    "changing tensor hook", watched(lambda o, k, _: o[k].register_hook(torch.cos)), 2, ON_TENSOR
)
rows_of("retain_grad", watched(lambda o, k, _: o[k].retain_grad()), 2, "retain_grad")
rows_of(
    "prehook of the node",
    watched(
        lambda o, k, see: o[k].grad_fn.register_prehook(
            lambda gs: (see(*gs), tuple(g.cos() for g in gs))[1]
        )
    ),
    2,
    ON_NODE,
)
rows_of(
    "hook of the producer's node",
    watched(lambda o, k, see: o[k].grad_fn.register_hook(lambda gi, go: see(*gi, *go))),
    None,
    "hook",
)
rows_of(
    "hook of the node",
    watched(lambda o, k, see: o[k].grad_fn.register_hook(lambda gi, _: see(*gi[:3])), LAST),
    2,
    "hook",
)
rows_of(
    "changing hook of the node",
    watched(lambda o, k, _: o[k].grad_fn.register_hook(lambda g, _: (g[0].cos(), *g[1:])), LAST),
    2,
    "hook",
)
rows_of(  # it sees what arrives there, which is the true gradient in any case
    "prehook of the node",
    watched(lambda o, k, _: o[k].grad_fn.register_prehook(lambda gs: (gs[0] * 2,)), LAST),
    3,
)
rows_of(
    "hook of several tensors",
    watched(
        lambda o, k, see: torch.autograd.graph.register_multi_grad_hook(o[:2], lambda gs: see(*gs)),
        (0,),
    ),
    1,
    ON_TENSOR,
)


@situation("hooks that were removed", None)  # torch keeps their empty places
def _(stack):
    outputs = stack.outputs()
    outputs[1].register_hook(lambda g: g.cos()).remove()
    outputs[2].grad_fn.register_hook(lambda *grads: None).remove()
    return step(stack, outputs[-1])


@situation("hooks on parameters", 3)  # of DDP, FSDP and optimisers that step in the backward
def _(stack):
    seen = []
    for leaf in stack.leaves:
        leaf.register_hook(lambda g: seen.append(g.clone()))
        leaf.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    return [*step(stack, stack()), *seen]


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
    torch.manual_seed(1)
    model = nn.Sequential(
        tfl.FusedLinearReLU(4, 5),
        tfl.FusedLinearGELU(5, 6),
        tfl.FusedLinearGELU(6, 7, approximate="none"),
        tfl.FusedLinear(7, 3),
    ).to(stack.x)
    seen = []
    register(model[1], lambda *ts: seen.extend(t.clone() for t in ts))
    x = stack.x.detach().requires_grad_()
    model(x).square().sum().backward()
    assert seen
    return [x.grad, *(p.grad for p in model.parameters()), *seen]


@situation("full backward hook of a module", 1, NOT_OURS)
def _(stack):
    return of_modules(
        stack, lambda m, see: m.register_full_backward_hook(lambda _, gi, go: see(*gi, *go))
    )


@situation("full backward pre-hook of a module", 1, NOT_OURS)
def _(stack):
    return of_modules(
        stack, lambda m, see: m.register_full_backward_pre_hook(lambda _, go: see(*go))
    )


# --- what stands between two layers --------------------------------------------------------------


def with_between(change: Callable[[Tensor], Tensor]):
    def scenario(stack):
        y = stack.x
        for k in range(4):
            y = stack.layer(k, y if k == 0 else change(y))
        return step(stack, y)

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
    ("in place", lambda y: y.mul(1).mul_(0.5), 0),
    ("norm", lambda y: F.layer_norm(y, y.shape[-1:]), 0),
):
    _reason = NOT_OURS if _handed == 0 else ""
    SITUATIONS[f"between: {_name}"] = Situation(with_between(_change), _handed, _reason)
SITUATIONS["between: detach"] = Situation(with_between(lambda y: y.detach()), 0)


@situation("between: dropout", 2, NOT_OURS, lead=(32,))  # the same mask on both paths
def _(stack):
    torch.manual_seed(7)
    y = stack.layer(1, stack.layer(0, stack.x))
    return step(stack, stack.layer(3, stack.layer(2, F.dropout(y, 0.5))))


@situation("residual connections", 2, widths=(4, 5, 4, 6, 4))
def _(stack):
    y = stack.x
    for k in (0, 2):
        y = y + stack.layer(k + 1, stack.layer(k, y))
    return step(stack, y)


OVER = {"activations": ("gelu_tanh", "relu", "none"), "widths": (4, 5, 6, 5)}


@situation("residual over the activation", 2, **OVER)  # the root adds, which is not counted
def _(stack):
    a = stack.layer(0, stack.x)
    out = a + stack.layer(2, stack.layer(1, a))
    return step(stack, out, gradients=[out.detach().cos()])


@situation("residual over the activation, summed", 1, "another consumer", **OVER)
def _(stack):
    a = stack.layer(0, stack.x)
    (a + stack.layer(2, stack.layer(1, a))).cos().sum().backward()
    return stack.grads()


def control_flow(stack, seed):
    """Layers skipped, repeated and exchanged at random, as Python code does."""
    choice, y = random.Random(seed), stack.x
    for _ in range(choice.randrange(1, 8)):
        for k in choice.sample(range(4), choice.randrange(1, 4)):
            y = stack.layer(k, y)
        if choice.random() < 0.3:
            y = y * 0.5
        if choice.random() < 0.2:
            y = y + stack.x
    return step(stack, y)


@pytest.mark.parametrize("seed", range(200))
def test_control_flow(seed, device):
    assert_equal_plain(partial(control_flow, seed=seed), None, widths=(4,) * 5, device=device)


@situation("several inputs through the same layers", 6)
def _(stack):
    torch.stack([stack(), (-stack.x * 2).sum() + stack()]).cos().sum().backward()
    return stack.grads()


@situation("fused::mlp and plain layers", 1, NOT_OURS, widths=(4, 5, 6, 8, 8))  # other nodes
def _(stack):
    y = stack.layer(1, stack.layer(0, stack.x))
    y = tfl.mlp(y, stack.weights[2:3], stack.biases[2:3])
    return step(stack, F.relu(F.linear(stack.layer(3, y), stack.weights[3].t())))


def five_times(stack):
    """The same parameters at every depth: one node each."""
    y = stack.x
    for _ in range(5):
        y = stack.layer(0, y)
    return step(stack, y)


for _name in ACTIVE:
    _options = {"activations": (_name,), "widths": (4, 4)}
    SITUATIONS[f"a shared layer: {_name}"] = Situation(five_times, 4, "", _options)
for _seed in range(8):  # each node counts the edges to all kinds of producers
    _kinds = [*random.Random(_seed).choices(["relu", "gelu_tanh", "silu", "glu"], k=6), "none"]
    SITUATIONS[f"every kind of layer {_seed}"] = Situation(
        lambda stack: step(stack, stack()), 5, "", {"activations": _kinds[-6:]}
    )


# --- other roots and consumers -------------------------------------------------------------------

ASKED = "its gradient was asked for"


def asked(stack, k, leaves=True, edge=False):
    outputs = stack.outputs()
    one = torch.autograd.graph.get_gradient_edge(outputs[k]) if edge else outputs[k]
    return torch.autograd.grad(outputs[-1], [one, *(stack.leaves if leaves else [])], stack.g)


def as_an_input(stack, k):
    outputs = stack.outputs()
    outputs[k].retain_grad()  # .grad of a tensor that is no leaf warns without
    grads = step(stack, outputs[-1], inputs=[outputs[k], stack.weights[0]])
    return [*grads, outputs[k].grad]


for _k in range(3):
    rows = {
        "asked alone": (partial(asked, k=_k, leaves=False), 2 - _k, ""),
        "asked with leaves": (partial(asked, k=_k), 2, ASKED),
        "asked as an edge": (partial(asked, k=_k, edge=True), 2, ASKED),
        "an input of the backward": (partial(as_an_input, k=_k), 2, ""),
    }
    for _name, _row in rows.items():
        SITUATIONS[f"output {_k} {_name}"] = Situation(*_row)


def a_root_too(stack, k):
    """Two gradients arrive, of which one has been dealt with."""
    outputs = stack.outputs()
    return step(stack, outputs[-1], outputs[k], gradients=[stack.g, outputs[k].detach().cos()])


def waiting(stack):
    """The first layer's note must outlive the notes of another branch that runs in between, though
    nothing else holds the gradient that it names once another has been added to it."""
    first = stack.layer(0, stack.x)
    branch = stack.layer(1, stack.layer(0, stack.x))
    last = stack.layer(1, first)  # made last, so its backward runs before the branch's
    roots = [last, first, branch]
    return torch.autograd.grad(roots, stack.leaves, [r.detach().cos() for r in roots])


def infinite(stack):
    """An overflow, as a loss scaler provokes it, is seen where it would be: as infinity or NaN.
    All else stays finite and equal."""
    outputs, g = stack.outputs(), stack.g.clone()
    g[0, 0] = torch.inf
    gradients = [g, torch.ones_like(outputs[0])]
    grads = torch.autograd.grad([outputs[-1], outputs[0]], stack.leaves, gradients)
    assert any(not t.isfinite().all() for t in grads)
    return [t for g in grads for t in (g.isfinite().double(), g.nan_to_num(0, 0, 0))]


def second_consumer(stack, second, added):
    """Added to the result, or a root of its own."""
    y = stack.layer(0, stack.x)
    extra, out = second(stack, y), stack.layer(1, y)
    if not added:
        return step(stack, out, extra)
    (out.cos().sum() + extra.sin().sum()).backward()
    return stack.grads()


def as_weight_too(stack):
    y = stack.layer(0, stack.x)
    return step(stack, OPS["none"].call(y, y), gradients=[stack.g @ stack.g.t()])


def as_bias_too(stack):
    y = stack.layer(0, stack.x)
    return step(stack, OPS["none"].call(y, stack.weights[1], y))


def consuming_root(stack, make):
    """A root that takes the first layer's output itself: the engine does not count its edges."""
    y = stack.layer(0, stack.x)
    out = make(stack, y, stack.layer(1, y))
    return step(stack, out, gradients=[out.detach().cos()])


SECOND = {
    "fused": lambda stack, y: OPS["gelu_tanh"].call(y, stack.weights[1] * 2),
    "linear": lambda stack, y: F.linear(y, stack.weights[1]),
    "sum": lambda stack, y: y.sum(),
    "view": lambda stack, y: y.view(-1)[2:],
    "index": lambda stack, y: y[1],
}
ROOTS = {
    "product": (lambda stack, y, z: z * y, 1),
    "product of sums": (lambda stack, y, z: z * y.sum(), 0),
    "torch op": (lambda stack, y, z: torch.addmm(z, y, stack.weights[1]), 1),
    "fused, other input": (lambda stack, y, z: OPS["relu"].call(y, z.t() @ z), 1),
    "fused, as weight": (lambda stack, y, z: OPS["relu"].call(z, y), 1),
    "fused, twice": (lambda stack, y, z: OPS["relu"].call(y, y), 0),
}
for _name in ACTIVE:
    _pair = {"activations": (_name, "none")}
    for _k in range(3):
        SITUATIONS[f"output {_k} a root too: {_name}"] = Situation(
            partial(a_root_too, k=_k), 3, "", {"activations": (_name,) * 3 + ("none",)}
        )
    SITUATIONS[f"a root whose note waits: {_name}"] = Situation(waiting, 2, "", _pair)
    if _name == "glu":
        continue  # it spreads infinities, and has another weight
    SITUATIONS[f"an infinite gradient at a root: {_name}"] = Situation(infinite, 1, "", _pair)
    for _second, _call in SECOND.items():
        for _added in (True, False):
            SITUATIONS[f"second consumer {_second}, added {_added}: {_name}"] = Situation(
                partial(second_consumer, second=_call, added=_added), 0, "another consumer", _pair
            )
    _vector = {**_pair, "lead": (), "widths": (4, 5, 5)}
    for _way, _scenario, _options in (
        ("weight", as_weight_too, _pair),
        ("bias", as_bias_too, _vector),
    ):
        SITUATIONS[f"as input and {_way}: {_name}"] = Situation(
            _scenario, 0, "another consumer", _options
        )
    for _root, (_make, _handed) in ROOTS.items():
        SITUATIONS[f"root {_root}: {_name}"] = Situation(
            partial(consuming_root, make=_make), _handed, "", {**_pair, "widths": (4, 5, 5)}
        )


@situation("every layer is a root", 3)
def _(stack):
    outputs = stack.outputs()
    return step(stack, *outputs, gradients=[o.detach().cos() for o in outputs])


@situation("a second consumer that is not on the way", 3)  # what does not run does not count
def _(stack):
    outputs = stack.outputs()
    other = outputs[1].cos().sum()
    grads = step(stack, outputs[-1])
    assert other.requires_grad
    return grads


AS_WEIGHT = {"activations": ("gelu_tanh", "none"), "widths": (4, 5, 5)}


@situation("only as weight", 0, **AS_WEIGHT)  # of which the layer before could not be told
def _(stack):
    y = stack.layer(0, stack.x)
    out = OPS["none"].call(stack.weights[1], y)
    return step(stack, out, gradients=[out.detach().cos()])


@situation("only as bias", 0, **AS_WEIGHT, lead=())
def _(stack):
    y = stack.layer(0, stack.x)
    return step(stack, OPS["none"].call(stack.g, stack.weights[1], y))


# --- runs of the engine --------------------------------------------------------------------------


@situation("retain_graph", 12)
def _(stack):
    y = stack()
    for factor in (1, -2, 3):
        stack.backward(y, gradients=[factor * stack.g], retain_graph=True)
    return step(stack, y)


@situation("create_graph", 0)
def _(stack):
    first = torch.autograd.grad(stack(), stack.leaves, stack.g, create_graph=True)
    return [t.detach() for t in first]


@situation("batched gradients", 3)  # the engine runs inside vmap
def _(stack):
    g = torch.stack([stack.g, -stack.g, stack.g.square()])
    return torch.autograd.grad(stack(), stack.leaves, g, is_grads_batched=True)


@situation("inference, then training", 3)
def _(stack):
    with torch.no_grad():
        before = stack()
    with torch.inference_mode():
        stack()
    y = stack()
    return [before, y.detach(), *step(stack, y)]


@situation("anomaly mode", 0, "anomaly mode")
def _(stack):
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return step(stack, stack())


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
    return step(stack, outputs[-1])


for _k in range(3):  # three in the second run; in the first, as many as were left before the hook
    SITUATIONS[f"aborted at layer {_k}, then again"] = Situation(
        partial(aborted, k=_k), 3 + min(3, 4 - _k)
    )


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
    return step(stack, stack.layer(3, stack.layer(2, Inner.apply(y))))


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
        y = stack()
        stack.backward(y, gradients=[stack.g])
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
    return step(stack, y)


def layers_of(stack):
    return [partial(stack.layer, k) for k in range(4)]


def checkpointed_whole(stack, reentrant):
    def whole(x):
        for layer in layers_of(stack):
            x = layer(x)
        return x

    return step(stack, checkpoint(whole, stack.x, use_reentrant=reentrant))


def in_segments(stack, reentrant):
    """The last segment is not checkpointed."""
    return step(stack, checkpoint_sequential(layers_of(stack), 2, stack.x, use_reentrant=reentrant))


for _inside in range(16):
    SITUATIONS[f"layers checkpointed: {_inside:04b}"] = Situation(
        partial(checkpointed, inside=_inside), 3
    )
SITUATIONS["layers checkpointed, reentrant"] = Situation(
    partial(checkpointed, inside=15, reentrant=True), 0
)
for _reentrant in (True, False):
    SITUATIONS[f"checkpointed whole, reentrant {_reentrant}"] = Situation(
        partial(checkpointed_whole, reentrant=_reentrant), 3
    )
    SITUATIONS[f"checkpointed in segments, reentrant {_reentrant}"] = Situation(
        partial(in_segments, reentrant=_reentrant), 2 if _reentrant else 3
    )


@situation("offloaded", 3)
def _(stack):
    with save_on_cpu(pin_memory=stack.x.is_cuda):
        y = stack()
    return step(stack, y)


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
    grads = step(stack, y)
    assert states and all(states), "autograd was switched off while unpacking"
    return grads


# --- the rows, run -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation(name, device):
    row = SITUATIONS[name]
    options = dict(row.options)
    if options.pop("cuda", False) and device.type != "cuda":
        pytest.skip("of GPUs")
    assert_equal_plain(row.scenario, row.handed, row.reason, device=device, **options)
