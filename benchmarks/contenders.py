"""The contenders of a case: ours, eager and the other baselines, all on the same data."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_fused_linear as tfl
from benchmarks import convolutions, gated, rivals, steps
from benchmarks.cases import KINDS, MEMORY_MODES, Case
from benchmarks.operands import Operands, sets_needed
from benchmarks.rivals import Network
from torch_fused_linear.activations import ACTIVATIONS
from torch_fused_linear.timing import Call, Contender

# The mode of torch.compile.
COMPILED = {
    "compile": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
    "reduce-overhead": "reduce-overhead",
    "compile+pass": None,
    "reduce-overhead+pass": "reduce-overhead",
    "compile again": "default",
}
FUSED_LAYERS = {
    "linear_relu": tfl.FusedLinearReLU,
    "linear_gelu": tfl.FusedLinearGELU,
    "linear_silu": tfl.FusedLinearSiLU,
}


# ---------------------------------------------------------------------------------- networks


def activation_of(case: Case):
    return ACTIVATIONS[KINDS[case.activation]]


def eager_stack(case: Case, data: Operands) -> nn.Sequential:
    *hidden, last = data.layers
    activation = activation_of(case).module
    return nn.Sequential(*(m for layer in hidden for m in (layer, activation())), last)


def eager(case: Case, data: Operands) -> Network:
    if len(data.layers) > 1:
        return eager_stack(case, data)
    weight, bias, act = data.layers[0].weight, data.layers[0].bias, activation_of(case)
    return lambda x: act.function(F.linear(x, weight, bias), **act.options)


def ours(case: Case, data: Operands, memory: str = "default") -> Network:
    act, (*hidden, last) = activation_of(case), data.layers
    options = dict(act.options) if memory == "default" else {"memory": memory, **act.options}
    if hidden:
        layer = FUSED_LAYERS[act.operator]
        fused = (layer.from_linear(linear, **options) for linear in hidden)
        return nn.Sequential(*fused, tfl.FusedLinear.from_linear(last))
    operator = getattr(tfl, act.operator)
    return lambda x: operator(x, last.weight, last.bias, **options)


def mlp(case: Case, data: Operands, memory: str = "default") -> Network:
    return tfl.FusedMLP.from_sequential(eager_stack(case, data), memory=memory)


def packed(case: Case, data: Operands) -> Network:
    """Packed at the first call, which is not timed; by layers of its own, as others have these."""
    own = replace(data, layers=copy.deepcopy(data.layers))
    for layer in own.layers:
        tfl.pack_weights(layer)
    return ours(case, own)


def addmm(case: Case, data: Operands) -> Network:
    weight, bias, gelu = data.layers[0].weight.t(), data.layers[0].bias, case.activation != "relu"
    return lambda x: torch._addmm_activation(bias, x, weight, use_gelu=gelu)


def linear(case: Case, data: Operands) -> Network:
    weight, bias = data.layers[0].weight, data.layers[0].bias
    return lambda x: F.linear(x, weight, bias)


def nvmath(case: Case, data: Operands) -> Network:
    (layer,), x = data.layers, data.input.detach()
    weight, bias = layer.weight.detach(), layer.bias.detach()
    product = rivals.nvmath(weight, x.t(), "RELU_AUX_BIAS", bias=bias)
    return lambda x: product()


def marked(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CUDA graphs of the compiler may write over what earlier calls gave."""

    def run(*arguments: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return call(*arguments)

    return run


def compiled(network: Network, name: str, conv: bool) -> tuple[Network, Counter | None]:
    """With our pass where the name says so, which counts what it puts in at the first call."""
    if not name.endswith("+pass"):
        return torch.compile(network, dynamic=False, mode=COMPILED[name]), None
    options = tfl.compile_options(COMPILED[name], conv=conv)
    replaced = options["pre_grad_custom_pass"].replaced
    return torch.compile(network, dynamic=False, options=options), replaced


def by_compiler(case: Case, data: Operands, name: str) -> Network:
    network, _ = compiled(network_of("eager", case, data), name, case.conv is not None)
    return marked(network)


def products(case: Case, data: Operands) -> Call:
    """The matrix products alone, as torch.mm does them: what no fusing can be faster than."""
    weights = [layer.weight.detach() for layer in data.layers]
    hidden = [data.input.new_empty(case.tokens, n).normal_() for n in case.sizes[1:-1]]
    inputs, grads = [data.input.detach(), *hidden], [*hidden, data.grad_output]
    if case.is_gated:  # gate and up read the same input
        inputs, grads = [inputs[0], *inputs], [grads[0], *grads]

    def run() -> None:
        if case.mode != "backward":
            for x, w in zip(inputs, weights):
                torch.mm(x, w.t())
        if case.mode != "forward":
            for x, w, g in zip(inputs, weights, grads):
                torch.mm(g, w)
                torch.mm(g.t(), x)

    return run


def accumulated(case: Case, data: steps.MicroBatches, name: str) -> Call:
    block = steps.our_block if name in ("ours", "apart") else steps.torchs_block
    if name in COMPILED:
        block, _ = compiled(block, name, conv=False)
    return steps.accumulated(case, data, block, by_products=name in ("ours", "compile+pass"))


# ------------------------------------------------------------------------------- who takes part


@dataclass(frozen=True)
class Work:
    """The work of one kind of case, and its data: by networks, of which the case's mode says
    what is run, and by calls that are the whole of it."""

    data: Callable[[Case, torch.device], Any]
    networks: Mapping[str, Callable[[Case, Any], Network]]
    calls: Mapping[str, Callable[[Case, Any], Call]]


def of_layers(makers: Mapping[str, Callable]) -> dict[str, Callable[[Case, Operands], Network]]:
    return {
        name: lambda case, data, make=make: make(data.layers, case.activation)
        for name, make in makers.items()
    }


BY_COMPILER = {
    name: partial(by_compiler, name=name)
    for name in ("compile", "max-autotune", "reduce-overhead", "compile+pass")
}
LAYERS = {
    "ours": ours,
    "mlp": mlp,
    "low": partial(ours, memory="low"),
    "mlp-low": partial(mlp, memory="low"),
    "packed": packed,
    "cublaslt": ours,
    "mlp-cublaslt": mlp,
    "eager": eager,
    "addmm": addmm,
    "linear": linear,
    "nvmath": nvmath,
    **of_layers(rivals.BLOCKS),
}
GATED, CONVOLUTIONS = of_layers(gated.BLOCKS), of_layers(convolutions.LAYERS)
ACCUMULATION = {
    name: partial(accumulated, name=name)
    for name in ("ours", "compile+pass", "apart", "eager", "compile")
}
WORK = {
    "layers": Work(Operands.random, LAYERS | BY_COMPILER, {"mm": products}),
    "gated": Work(Operands.random, GATED | BY_COMPILER, {"mm": products}),
    "conv": Work(Operands.random, CONVOLUTIONS | BY_COMPILER, {"conv": convolutions.bare}),
    "edge": Work(steps.Edge, {}, steps.EDGE),
    "one pass": Work(steps.OnePass, {}, steps.ONE_PASS),
    "accumulation": Work(steps.MicroBatches, {}, ACCUMULATION),
}
OF_MODELS = {"fused", "fused-low", "eager", *COMPILED} - {"max-autotune"}  # in models.py
BASELINES = tuple(
    dict.fromkeys(
        name
        for work in WORK.values()
        for name in (*work.networks, *work.calls)
        if name not in ("ours", "mlp", "fused", "compile+pass")
    )
)


def applies(name: str, case: Case, device: torch.device) -> bool:
    """Returns whether contender `name` can run `case`."""
    if case.model:
        needs_gpu = name.startswith("reduce-overhead")  # CUDA graphs
        return name in OF_MODELS and (device.type == "cuda" or not needs_gpu)
    work, on_gpu = WORK[case.kind], device.type == "cuda"
    if name not in work.networks and name not in work.calls:
        return False
    if name == "nvmath" and not (on_gpu and importlib.util.find_spec("nvmath")):
        return False
    if name in gated.OTHERS or name in rivals.BLOCKS:
        return on_gpu and (case.is_gated or rivals.fits(name, case.sizes, case.activation))
    if case.mode in MEMORY_MODES:
        return name not in (*COMPILED, *work.calls, "addmm", "linear", "nvmath")
    if name in COMPILED:
        return case.mode in ("forward", "step") or case.suite == "accumulation"
    if case.kind != "layers":
        return True
    one_layer = len(case.sizes) == 2
    if name in ("mlp", "mlp-low", "mlp-cublaslt"):
        return not one_layer
    if name not in ("packed", "addmm", "linear", "nvmath"):
        return True
    # addmm's GELU is the tanh form on the GPU and the erf form on the CPU.
    computed = {"addmm": ("relu", "gelu" if on_gpu else "gelu-erf"), "nvmath": ("relu",)}
    computes = case.activation in computed.get(name, (case.activation,))
    return one_layer and case.mode == "forward" and computes and not (name == "packed" and on_gpu)


# ------------------------------------------------------------------------------------- modes


def network_of(name: str, case: Case, data: Operands) -> Network:
    return WORK[case.kind].networks[name](case, data)


def data_sets(case: Case, device: torch.device) -> list[Any]:
    """The data that all contenders of the case use, in turns."""
    make = WORK[case.kind].data
    first = make(case, device)
    # a graph holds its addresses; memory has no cache
    one = case.mode == "graph" or case.mode in MEMORY_MODES
    count = 1 if one else sets_needed(first.nbytes, device)
    return [first, *(make(case, device) for _ in range(count - 1))]


def step_of(
    forward: Call,
    leaves: Iterable[Tensor],
    grad: Tensor | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Call:
    """The backward begins with the output's gradient; a loss has none."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(grad)
        if optimizer is not None:
            optimizer.step()

    return step


def network_step(network: Network, data: Operands) -> Call:
    own = network.parameters() if isinstance(network, nn.Module) else ()
    return step_of(lambda: network(data.input), [*data.leaves, *own], data.grad_output)


def graph_of(step: Call) -> Call:
    """`step` captured once; torch asks for warm calls on a side stream before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.step = step  # holds the tensors that every replay reads
    return graph.replay


def call_of(name: str, case: Case, data: Any) -> Call:
    calls = WORK[case.kind].calls
    if name in calls:
        call = calls[name](case, data)
    else:
        network = network_of(name, case, data)
        if case.mode == "forward":
            return lambda: network(data.input)
        if case.mode == "backward":
            output, leaves = network(data.input), data.leaves
            return lambda: torch.autograd.grad(output, leaves, data.grad_output, retain_graph=True)
        call = network_step(network, data)
    return graph_of(call) if case.mode == "graph" else call


@contextlib.contextmanager
def conditions_of(name: str, case: Case) -> Iterator[None]:
    policy = "cublaslt" if name.endswith("cublaslt") else "auto"
    with tfl.set_policy(policy), torch.set_grad_enabled(case.with_gradients):
        yield


def events_of(contender: Contender, device: torch.device) -> list[Any]:
    """The kernels that one call runs on a GPU, or its operators on the CPU."""
    kind = device.type.upper()
    activity = getattr(torch.profiler.ProfilerActivity, kind)
    with (
        contender.conditions(),
        torch.profiler.profile(activities=[activity], acc_events=True) as profile,
    ):
        contender.call()
        if kind == "CUDA":
            torch.cuda.synchronize()
    wanted = getattr(torch.autograd.DeviceType, kind)
    return [event for event in profile.events() if event.device_type == wanted]


def in_turns(calls: Sequence[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]
    following = itertools.cycle(calls).__next__
    return lambda: following()()


def contender(name: str, case: Case, sets: Sequence[Any]) -> Contender:
    conditions = partial(conditions_of, name, case)
    if name in COMPILED or name == "nvmath":
        sets = sets[:1]  # each set would be compiled or planned for anew; warm caches favour it
    with conditions():
        calls = [call_of(name, case, data) for data in sets]
    return Contender(name, in_turns(calls), conditions)
