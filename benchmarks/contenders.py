"""What runs for a case: ours, eager and the other baselines, all on the same data."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_fused_linear as tfl
from benchmarks import convolutions, edge, gated, rivals
from benchmarks.cases import KINDS, Case
from benchmarks.operands import Operands
from torch_fused_linear.activations import ACTIVATIONS
from torch_fused_linear.timing import Call, Contender

Network = Callable[[Tensor], Tensor]

COMPILE_MODES = {
    "compile": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
    "reduce-overhead": "reduce-overhead",
}
COMPILED = (*COMPILE_MODES, "compile+pass", "reduce-overhead+pass", "compile again")
MODEL_CONTENDERS = ("fused", "fused-low", "eager", "compile", "compile+pass", "compile again")
BASELINES = (
    *("low", "mlp-low", "packed", "cublaslt", "mlp-cublaslt"),
    *("eager", "addmm", "mm", "linear", *COMPILE_MODES, "nvmath"),
    "copy",  # of the suite `activation` only
    "conv",  # of convolutions only
    *gated.OTHERS,  # of gated blocks only
    *(name for name in rivals.BLOCKS if name not in gated.OTHERS),  # of the suite `rivals` only
)
POLICIES = {
    **dict.fromkeys(("ours", "mlp", "fused", "compile+pass", "reduce-overhead+pass"), "auto"),
    **dict.fromkeys(("low", "mlp-low", "fused-low", "packed"), "auto"),
    **dict.fromkeys(("cublaslt", "mlp-cublaslt"), "cublaslt"),
}


# ---------------------------------------------------------------------------------- networks


def approximate(case: Case) -> str:
    return ACTIVATIONS[KINDS[case.activation]].approximate


def bare_convolution(case: Case, data: Operands) -> Callable[[], object]:
    """The convolution alone, without bias and ReLU: what no fusing can be faster than."""
    conv, backward = case.conv, case.mode != "forward"
    x, weight, grad = data.input.detach(), data.layers[0].weight.detach(), data.grad_output
    stride, padding, one = [conv.stride] * 2, [conv.padding] * 2, [1, 1]
    gradient = torch.ops.aten.convolution_backward

    def run() -> None:
        F.conv2d(x, weight, None, stride, padding, one, conv.groups)
        if backward:
            wanted = [not conv.is_stem, True, False]
            gradient(
                grad, x, weight, None, stride, padding, one, False, [0, 0], conv.groups, wanted
            )

    return run


def eager_stack(case: Case, data: Operands) -> nn.Sequential:
    def activation() -> nn.Module:
        if case.activation == "silu":
            return nn.SiLU()
        return nn.ReLU() if case.activation == "relu" else nn.GELU(approximate=approximate(case))

    hidden = (m for layer in data.layers[:-1] for m in (layer, activation()))
    return nn.Sequential(*hidden, data.layers[-1])


def eager(case: Case, data: Operands) -> Network:
    if case.is_gated:
        return gated.Block(data.layers)
    if case.conv:
        return convolutions.eager(*data.layers)
    if len(data.layers) > 1:
        return eager_stack(case, data)
    weight, bias, form = data.layers[0].weight, data.layers[0].bias, approximate(case)
    if case.activation == "relu":
        return lambda x: F.relu(F.linear(x, weight, bias))
    if case.activation == "silu":
        return lambda x: F.silu(F.linear(x, weight, bias))
    return lambda x: F.gelu(F.linear(x, weight, bias), approximate=form)


def ours(case: Case, data: Operands, memory: str = "default") -> Network:
    if case.conv:
        return tfl.FusedConv2dReLU.from_conv(*data.layers)
    relu, form = case.activation == "relu", approximate(case)
    if len(data.layers) > 1:
        layer = tfl.FusedLinearReLU if relu else tfl.FusedLinearGELU
        options = {"memory": memory} if relu else {"memory": memory, "approximate": form}
        *hidden, last = data.layers
        fused = (layer.from_linear(linear, **options) for linear in hidden)
        return nn.Sequential(*fused, tfl.FusedLinear.from_linear(last))
    weight, bias = data.layers[0].weight, data.layers[0].bias
    if relu:
        return lambda x: tfl.linear_relu(x, weight, bias, memory)
    if case.activation == "silu":
        return lambda x: tfl.linear_silu(x, weight, bias, memory)
    return lambda x: tfl.linear_gelu(x, weight, bias, form, memory)


def mlp(case: Case, data: Operands, memory: str = "default") -> Network:
    return tfl.FusedMLP.from_sequential(eager_stack(case, data), memory)


def addmm(case: Case, data: Operands) -> Network:
    weight, bias, gelu = data.layers[0].weight.t(), data.layers[0].bias, case.activation != "relu"
    return lambda x: torch._addmm_activation(bias, x, weight, use_gelu=gelu)


def linear(case: Case, data: Operands) -> Network:
    weight, bias = data.layers[0].weight, data.layers[0].bias
    return lambda x: F.linear(x, weight, bias)


def compiled(case: Case, data: Operands, mode: str) -> Network:
    network = torch.compile(eager(case, data), mode=mode, dynamic=False)

    def run(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return network(x)

    return run


def compiled_with_pass(case: Case, data: Operands) -> Network:
    return torch.compile(
        eager(case, data), dynamic=False, options=tfl.compile_options(conv=case.conv is not None)
    )


def nvmath(case: Case, data: Operands) -> Network:
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    # NVIDIA's form: the weight comes first and columns are the batch, so the bias goes by rows.
    product = Matmul(data.layers[0].weight.detach(), data.input.detach().t())
    epilog_inputs = {"bias": data.layers[0].bias.detach()}
    product.plan(epilog=MatmulEpilog.RELU_AUX_BIAS, epilog_inputs=epilog_inputs)
    product.autotune(iterations=5)
    return lambda x: product.execute()


NETWORKS: dict[str, Callable[[Case, Operands], Network]] = {
    "ours": ours,
    "mlp": mlp,
    "low": partial(ours, memory="low"),
    "mlp-low": partial(mlp, memory="low"),
    "packed": ours,
    "cublaslt": ours,
    "mlp-cublaslt": mlp,
    "eager": eager,
    "addmm": addmm,
    "linear": linear,
    "nvmath": nvmath,
    "compile+pass": compiled_with_pass,
    **{name: partial(compiled, mode=mode) for name, mode in COMPILE_MODES.items()},
}


def network_of(name: str, case: Case, data: Operands) -> Network:
    if case.is_gated and name in gated.BLOCKS:
        return gated.BLOCKS[name](data.layers)
    if name in rivals.BLOCKS:
        return rivals.BLOCKS[name](data.layers, case.activation)
    return NETWORKS[name](case, data)


def applies(name: str, case: Case, device: torch.device) -> bool:
    """Whether contender `name` can do what `case` asks for."""
    if case.is_gated:
        known = {*gated.BLOCKS, "mm", *COMPILED}
        return name in known and (name not in gated.OTHERS or device.type == "cuda")
    if name in rivals.BLOCKS:
        is_asked = case.suite == "rivals" and device.type == "cuda"
        return is_asked and rivals.applies(name, case.activation)
    if case.model:
        compiled = name.startswith("reduce-overhead") and device.type == "cuda"
        return compiled or name in MODEL_CONTENDERS
    if case.conv and name in ("ours", "eager", "conv"):
        return True
    if case.conv and name not in COMPILED:
        return False
    if case.mode == "edge" and name not in edge.NAMES:
        return False
    one_layer, inference = len(case.sizes) == 2, case.mode == "forward"
    if name in ("mlp", "mlp-low", "mlp-cublaslt"):
        return hasattr(tfl, "FusedMLP") and not one_layer
    if name == "packed":
        return one_layer and inference and device.type == "cpu"
    if name == "addmm":  # its GELU is the tanh form on the GPU and the erf form on the CPU
        computes = {"relu", "gelu" if device.type == "cuda" else "gelu-erf"}
        return one_layer and inference and case.activation in computes
    if name == "linear":
        return one_layer and inference
    if name == "nvmath":
        found = importlib.util.find_spec("nvmath") is not None and device.type == "cuda"
        return (
            found and one_layer and case.mode in ("forward", "edge") and case.activation == "relu"
        )
    if name in COMPILED:
        return case.mode in ("forward", "step")
    return name not in ("copy", "conv", "fused", *gated.OTHERS)


# ------------------------------------------------------------------------------------- modes


def step_of(network: Network, data: Operands) -> Call:
    own = network.parameters() if isinstance(network, nn.Module) else ()
    leaves = [*data.leaves, *own]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        network(data.input).backward(data.grad_output)

    return step


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


def call_of(mode: str, network: Network, data: Operands) -> Call:
    if mode == "forward":
        return lambda: network(data.input)
    if mode == "backward":
        output, leaves = network(data.input), data.leaves
        return lambda: torch.autograd.grad(output, leaves, data.grad_output, retain_graph=True)
    step = step_of(network, data)
    return graph_of(step) if mode == "graph" else step


def products(case: Case, data: Operands) -> Call:
    """The matrix products alone, as torch.mm does them: what no fusing can be faster than."""
    if case.is_gated:
        return gated.products(data.layers, data.input, data.grad_output, case.mode != "forward")
    weights = [layer.weight.detach() for layer in data.layers]
    hidden = [data.input.new_empty(case.tokens, n).normal_() for n in case.sizes[1:-1]]
    inputs, grads = [data.input.detach(), *hidden], [*hidden, data.grad_output]

    def run() -> None:
        if case.mode != "backward":
            for x, w in zip(inputs, weights):
                torch.mm(x, w.t())
        if case.mode != "forward":
            for x, w, g in zip(inputs, weights, grads):
                torch.mm(g, w)
                torch.mm(g.t(), x)

    return graph_of(run) if case.mode == "graph" else run


@contextlib.contextmanager
def conditions_of(name: str, case: Case) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if name in POLICIES:
            stack.enter_context(tfl.set_policy(POLICIES[name]))
        stack.enter_context(torch.set_grad_enabled(case.with_gradients))
        yield


@contextlib.contextmanager
def weights_packed(
    conditions: Callable[[], contextlib.AbstractContextManager],
    layers: Sequence[nn.Module],
    calls: Sequence[Call],
) -> Iterator[None]:
    """The conditions, with all weights packed: that takes a call with each, which is not timed."""
    with conditions():
        for layer in layers:
            tfl.pack_weights(layer)
        try:
            for call in calls:
                call()
            yield
        finally:
            for layer in layers:
                tfl.unpack_weights(layer)


def in_turns(calls: Sequence[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]
    following = itertools.cycle(calls).__next__
    return lambda: following()()


def contender(name: str, case: Case, sets: Sequence[Operands]) -> Contender:
    conditions = partial(conditions_of, name, case)
    if name in COMPILED or name == "nvmath":
        sets = sets[:1]  # each set would be compiled or planned for anew; warm caches favour it
    with conditions():
        if case.mode == "edge":
            calls = [edge.call_of(name, case, sets[0].input.device)]
        elif name == "mm":
            calls = [products(case, data) for data in sets]
        elif name == "conv":
            calls = [bare_convolution(case, data) for data in sets]
            if case.mode == "graph":
                calls = [graph_of(call) for call in calls]
        else:
            calls = [call_of(case.mode, network_of(name, case, data), data) for data in sets]
    if name == "packed":
        layers = [layer for operands in sets for layer in operands.layers]
        conditions = partial(weights_packed, conditions, layers, calls)
    return Contender(name, in_turns(calls), conditions)
