"""Gradients that the product adds to what is there: the same programs, with and without."""

import copy
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from helpers import device_param
from operators import LOW_DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS
from torch_fused_linear.graph import accumulated_weights

WIDTHS = (6, 16, 8, 5)


def with_our_pass(function):
    return torch.compile(function, options=tfl.compile_options())


class Program:
    """A network, its gradients by name, and what hooks have seen."""

    def __init__(self, make, device="cpu", compiled=False, dtype=torch.double):
        torch.manual_seed(0)
        self.call = self.model = make().to(device, dtype)
        if compiled:
            torch._dynamo.reset()  # or at its limit of graphs for a function it would run eager
            self.call = with_our_pass(self.model)
        self.at = {"device": device, "dtype": dtype}
        self.seen = []
        self.micro_batches = 0

    def loss(self):
        torch.manual_seed(self.micro_batches)
        self.micro_batches += 1
        x = torch.randn(9, WIDTHS[0], dtype=torch.double).to(**self.at).requires_grad_()
        return self.call(x).square().sum()

    @property
    def weights(self):
        return [p for p in self.parameters if p.dim() == 2]

    @property
    def parameters(self):
        return list(self.model.parameters())

    def state(self):
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        return {n: None if g is None else g.to_dense().clone() for n, g in grads.items()}, self.seen


def chain(**settings):
    a, b, c = itertools.pairwise(WIDTHS)
    return torch.nn.Sequential(
        tfl.FusedLinearGELU(*a, **settings),
        tfl.FusedLinearReLU(*b, **settings),
        tfl.FusedLinear(*c),
    )


class Residual(torch.nn.Module):
    """A gradient that passes a layer and one that is added to it."""

    def __init__(self):
        super().__init__()
        self.first = tfl.FusedLinearSiLU(WIDTHS[0], 8)
        self.second = tfl.FusedLinearReLU2(8, 8, bias=False)

    def forward(self, x):
        h = self.first(x)
        return h + self.second(h)


MODELS = {
    "layers": chain,
    "low memory": lambda: chain(memory="low"),
    "mlp": lambda: tfl.FusedMLP(*WIDTHS, activation="gelu_tanh"),
    "mlp, low memory": lambda: tfl.FusedMLP(*WIDTHS, activation="silu", memory="low"),
    "gated": lambda: tfl.FusedGatedMLP(WIDTHS[0], 16),
    "gated, low memory": lambda: tfl.FusedGatedMLP(WIDTHS[0], 16, memory="low"),
    "residual": Residual,
}


def steps(program, count=3):
    for _ in range(count):
        program.loss().backward()


def run_both(scenario, make=chain, *, into="grad", taken=True, device="cpu", compiled=False):
    """Runs a program with and without; compares gradients and what was seen; and whether products
    added at all."""
    ours, theirs = (Program(make, device, compiled=compiled) for _ in range(2))
    with tfl.accumulate_gradients(ours.model, into), tfl.explain() as report:
        scenario(ours)
    scenario(theirs)
    (grads, seen), (expected, expected_seen) = ours.state(), theirs.state()
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(seen, expected_seen)
    added = any(call.operator == "_weight_gradient" for call in report.calls)
    assert added == taken, report
    return report


@pytest.mark.parametrize("starts_at_a_layer", [True, False])
def test_a_tied_weight_whatever_the_backward_starts_at(starts_at_a_layer):
    """Its sum is torch's, and it is not added before the last use."""
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x, results = torch.randn(3, 4, dtype=torch.float64), []
    for ours in (True, False):
        w.grad, seen = torch.ones_like(w), []
        with tfl.accumulate_gradients([w] if ours else []):
            h = (tfl.linear if ours else F.linear)(x, w)
            h.register_hook(lambda _, s=seen: s.append(w.grad.clone()))  # between the two uses
            h = (tfl.linear if ours else F.linear)(h.cos(), w)
            if starts_at_a_layer:
                h.backward(torch.ones_like(h))
            else:
                h.sum().backward()
        results.append([w.grad, *seen])
    torch.testing.assert_close(*results)


@device_param
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_sums_are_torchs_in_every_kind_of_layer(make, device, compiled):
    report = run_both(steps, make, device=device, compiled=compiled)
    added = [call for call in report.calls if call.operator == "_weight_gradient"]
    program = Program(make)
    # A last layer's bias, of which a compiler makes the sum; others' sums come with their products.
    own_sums = 0 if compiled else program.parameters[-1].dim() == 1
    assert len(added) == 2 * (len(program.weights) + own_sums)  # the first micro-batch writes


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("what", ["input", "its view", "gradient"])
def test_a_product_does_not_read_the_sum_that_it_writes(what, compiled):
    sums = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.double))
        x, w.grad = torch.randn(2, 4, 4, dtype=torch.double)
        x = {"input": w.grad, "its view": w.grad.t(), "gradient": x}[what]
        call = tfl.linear if is_ours else torch.nn.functional.linear
        with tfl.accumulate_gradients([w]):
            y = (with_our_pass(call) if compiled else call)(x, w)
            y.backward(w.grad if what == "gradient" else torch.ones_like(y))
        sums.append(w.grad)
    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("make", [MODELS["mlp"], MODELS["gated"]])
def test_a_node_that_reads_a_sum_later_does_not_write_it(make):
    grads = []
    for into in ("grad", "main_grad"):  # of which there is none
        p = Program(make)
        for w in p.weights:
            w.grad = torch.randn_like(w)
        with tfl.accumulate_gradients(p.model, into):
            p.call(p.weights[-1].grad.flatten()[:36].view(6, 6)).square().sum().backward()
        grads.append(p.state()[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("make", [MODELS[name] for name in ("layers", "mlp", "mlp, low memory")])
@pytest.mark.parametrize("bias", range(3))
def test_a_gradient_that_is_a_sum_of_biases_is_read_before(make, bias):
    sums = []
    for is_shared in (True, False):
        p = Program(make)
        y = p.call(torch.ones(9, WIDTHS[0], dtype=torch.double))
        grad = torch.linspace(-1, 1, y.numel(), dtype=torch.double).view_as(y)
        for q in p.parameters:
            q.main_grad = torch.zeros_like(q)
        b = [q for q in p.parameters if q.dim() == 1][bias]
        of_grad = grad.view(-1)[: b.numel()]
        b.main_grad = of_grad if is_shared else of_grad.clone()
        with tfl.accumulate_gradients(p.model, "main_grad"):
            y.backward(grad)
        for q in p.parameters:  # of what shares memory torch has the gradient to add
            q.main_grad += 0 if q.grad is None else q.grad
        sums.append([q.main_grad for q in p.parameters])
    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_graph_that_reads_a_sum_does_not_write_it(into):
    w, v = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    w.grad, v.grad = w.main_grad, v.main_grad = torch.ones(8, 8), torch.ones(8, 8)
    s, read = torch.ones(8, 8, requires_grad=True), getattr(w, into)

    def loss(x):
        return tfl.linear(torch.relu(tfl.linear(x, v)), w).sum() + (s * read).sum()

    with tfl.accumulate_gradients([w, v], into):
        with_our_pass(loss)(torch.randn(4, 8, requires_grad=True)).backward()
    assert torch.equal(s.grad, torch.ones(8, 8))


def test_cpu_graphs_compare_addresses_of_their_inputs():
    """Also to a sum on a GPU, whose fake tensors know one device each."""
    with FakeTensorMode():
        grad, x, w = (torch.empty(*size, device="cuda") for size in ((3, 4), (3, 5), (4, 5)))
        told = torch.ops.fused._storages([grad, x])
        made = torch.ops.fused._accumulated_weight_gradient(grad, x, w, torch.float32, told)
    assert (told.device.type, made.device, made.shape) == ("cpu", w.device, w.shape)


def test_gradients_stay_the_tensors_that_they_are():
    program = Program(chain)
    with tfl.accumulate_gradients(program.model):
        steps(program, 1)
        before = [(p.grad, p.grad._version, p.grad.data_ptr()) for p in program.parameters]
        steps(program, 1)
    for parameter, (grad, version, address) in zip(program.parameters, before, strict=True):
        assert parameter.grad is grad and grad.data_ptr() == address
        assert grad._version > version


# ---- who sees what ------------------------------------------------------------------------------


def hooks(register, which):
    """Steps where some parameters have a hook, which shows `see` what it sees."""

    def scenario(p):
        p.kept = [register(w, lambda g: p.seen.append(g.clone())) for w in p.parameters[which]]
        steps(p)

    return scenario


def on_the_accumulator(method, hook):
    def register(w, see):
        node = w.expand_as(w).grad_fn.next_functions[0][0]
        return node, getattr(node, method)(hook(w, see))

    return register


def clearing(w, see):
    def clear(w):
        see(w.grad)
        w.grad = None

    w.register_post_accumulate_grad_hook(clear)


def other_gradients(make, count=3):
    """Steps that add to gradients which somebody else has made."""

    def scenario(p):
        steps(p, 1)
        for w in p.parameters:
            w.grad = make(w)
        steps(p, count)

    return scenario


def flat_views(tensors):
    """Zeros in one buffer, and the views of it that have the shapes of the tensors."""
    flat = torch.zeros(sum(t.numel() for t in tensors), dtype=torch.double)
    parts = flat.split([t.numel() for t in tensors])
    return flat, [part.view_as(t) for part, t in zip(parts, tensors)]


def flat_buffer(p):
    flat, views = flat_views(p.parameters)
    for w, view in zip(p.parameters, views):
        w.grad = view
    steps(p)
    p.seen.append(flat)


def hook_on_the_node(p):
    for _ in range(3):
        loss = p.model[2](p.model[1](p.model[0](torch.ones(2, WIDTHS[0], dtype=torch.double))))
        loss.grad_fn.register_hook(lambda grads, _: p.seen.append(grads[1].clone()))
        loss.sum().backward()


def after_a_step(then):
    def scenario(p):
        steps(p, 1)
        then(p)

    return scenario


def anomaly_mode(p):
    with torch.autograd.detect_anomaly(check_nan=False):
        steps(p)


def retain_graph(p):
    loss = p.loss()
    for _ in range(3):
        loss.backward(retain_graph=True)


def tied_twice(p):
    def loss(x, w):
        h = tfl.linear_relu(x, w) + tfl.linear_gelu(x * 2, w, approximate="none") + x @ w.t()
        return h.sum() + w.sum()

    call = loss if p.call is p.model else with_our_pass(loss)
    for _ in range(3):
        torch.manual_seed(1)
        x = torch.randn(4, WIDTHS[0], dtype=torch.double, requires_grad=True)
        call(x, p.weights[0]).backward()


def frozen(before):
    def scenario(p):
        steps(p, before)
        p.weights[1].requires_grad_(False)
        steps(p)

    return scenario


def cleared_in_between(p):
    for _ in range(4):
        loss = p.loss()
        if p.micro_batches == 3:
            p.model.zero_grad()
        loss.backward()


def in_two_nodes(p):
    """Which give the same weights gradients, in compiled programs one of them eager."""
    for heard in (False, True):
        for w in p.weights if heard else ():
            getattr(w, BEHIND)(lambda w: p.seen.append(w.grad.to_dense().clone()))
        for _ in range(2):
            x = torch.ones(2, WIDTHS[0], dtype=torch.double)
            (p.loss() + p.model(x).sum()).backward()


def read_elsewhere(p):
    """By nodes that run after the layers'."""
    steps(p, 1)
    penalty = sum((w * w.grad.data).sum() for w in p.parameters)
    (p.loss() + penalty).backward()


def frozen_in_between(p):
    steps(p, 1)
    loss = p.loss()
    p.weights[1].requires_grad_(False)
    loss.backward()


def held(p):
    steps(p, 1)
    holders = [w.grad for w in p.parameters] + [w.grad.view(-1)[:3] for w in p.parameters]
    steps(p)
    p.seen += [h.clone() for h in holders]


def part_of_a_graph(p):
    p.loss().backward(create_graph=True)
    p.penalty = sum(w.grad.square().sum() for w in p.parameters)
    p.penalty.backward()
    p.model.zero_grad()
    steps(p)


def fails_in_the_middle(p):
    steps(p, 1)

    def fail(_):
        raise ArithmeticError

    handle = p.model[0].bias.register_hook(fail)
    with pytest.raises(ArithmeticError):
        p.loss().backward()
    handle.remove()
    p.seen += [w.grad.clone() for w in p.weights]
    steps(p, 1)


def checkpointed(p):
    for use_reentrant in (False, True):
        x = torch.ones(3, WIDTHS[0], dtype=torch.double, requires_grad=True)
        for _ in range(2):
            checkpoint(p.call, x, use_reentrant=use_reentrant).square().sum().backward()


def saved_tensors_on_the_cpu(p):
    with torch.autograd.graph.save_on_cpu():
        steps(p)


def clipped_and_stepped(p):
    optimizer = torch.optim.AdamW(p.model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        steps(p)
        p.seen.append(torch.nn.utils.clip_grad_norm_(p.model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    p.seen += [q.detach().clone() for q in p.model.parameters()]


def other_data(p):
    steps(p, 1)
    p.model[2].weight.data = torch.ones_like(p.model[2].weight)  # another tensor in the parameter
    steps(p)


def cleared_by_a_hook(p):
    """A weight's hook runs before its layer's bias has its gradient."""
    layer = p.model[2]
    layer.weight.register_post_accumulate_grad_hook(lambda _: layer.zero_grad(set_to_none=False))
    steps(p)


def other_sizes(rows_of):
    def play(p):
        loss, bias = p.loss(), p.model[2].bias
        bias.data = bias.data.repeat(rows_of(bias), 1)
        bias.grad = torch.ones_like(bias)
        loss.backward()
        p.seen.append(bias.grad)
        p.model[2].bias = None

    return play


def swapped(p):
    steps(p, 1)
    weight = p.weights[1]
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.ones_like(weight)))
    steps(p)


ALL, FIRST, MIDDLE = slice(6), slice(2), slice(2, 4)
BEHIND = "register_post_accumulate_grad_hook"
ADDED = {
    "hook on another weight": hooks(lambda w, see: w.register_hook(see), MIDDLE),
    "hook behind the sum": hooks(lambda w, see: getattr(w, BEHIND)(lambda w: see(w.grad)), ALL),
    "hook that clears": hooks(clearing, FIRST),
    "hook on the accumulator": hooks(
        on_the_accumulator("register_hook", lambda w, see: lambda *_: see(w.grad)), MIDDLE
    ),
    "hook before the accumulator": hooks(
        on_the_accumulator("register_prehook", lambda w, see: lambda g: see(g[0])), MIDDLE
    ),
    "only some inputs": after_a_step(lambda p: p.loss().backward(inputs=p.parameters[::3])),
    "frozen": frozen(0),
    "frozen later": frozen(2),
    "exchanged": other_gradients(torch.ones_like),
    "by columns": other_gradients(lambda w: torch.ones_like(w).t().contiguous().t()),
}
NAMED = (retain_graph, held, flat_buffer, fails_in_the_middle, checkpointed)
NAMED += (saved_tensors_on_the_cpu, clipped_and_stepped, other_data, part_of_a_graph)
NAMED += (cleared_in_between, frozen_in_between, swapped, cleared_by_a_hook)
ADDED |= {scenario.__name__: scenario for scenario in NAMED}
APART = {  # and what explain says of it; of a formula it has no row
    "hook that changes": (
        hooks(lambda w, see: w.register_hook(lambda g: 2 * g), ALL),
        "a hook on the weight",
    ),
    "hook on the node": (hook_on_the_node, "a hook on the node"),
    "asked for": (
        after_a_step(lambda p: p.seen.extend(torch.autograd.grad(p.loss(), p.parameters))),
        "its gradient was asked for",
    ),
    "create_graph": (after_a_step(lambda p: p.loss().backward(create_graph=True)), ""),
    "anomaly mode": (anomaly_mode, "anomaly mode"),
    "tied_twice": (tied_twice, ""),
    "in_two_nodes": (in_two_nodes, "used more than once"),
    "read_elsewhere": (read_elsewhere, "used more than once"),
    "with gaps": (
        other_gradients(lambda w: torch.zeros(*w.shape, 2).to(w)[..., 0]),
        "strides that do not fit",
    ),
    "negated": (
        other_gradients(lambda w: torch._neg_view(torch.ones_like(w))),
        "a view that negates",
    ),
    "a row": (other_sizes(lambda bias: 1), ""),
    "a square": (other_sizes(len), ""),
    "sparse": (other_gradients(lambda w: torch.ones_like(w).to_sparse(), 1), "not a plain tensor"),
}


# torch does not differentiate a compiled backward; of a failure the graph knows when it has ended;
# what is compiled cannot be swapped.
NOT_COMPILED = {"create_graph", "part_of_a_graph", "fails_in_the_middle", "swapped"}
NOT_COMPILED |= {"a row", "a square"}
COMPILED = [(name, True) for name in (*ADDED, *APART) if name not in NOT_COMPILED]


@pytest.mark.parametrize("name, compiled", [*((n, False) for n in (*ADDED, *APART)), *COMPILED])
@torch._functorch.config.patch(donated_buffer=False)  # or graphs cannot be retained
def test_as_torch_whether_products_add_or_something_sees_the_gradient(name, compiled):
    scenario, reason = APART.get(name) or (ADDED[name], "")
    # the last layer of that one alone is looked at
    taken = name in ADDED or name == "hook on the node"
    report = run_both(scenario, taken=taken, compiled=compiled)
    assert not reason or f"weight's gradient apart: {reason}" in str(report)


# ---- compiled -----------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A layer with twice its gradient, made by a compiled function."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        def gradient(x, w, grad):
            step = torch.ops.fused._linear_backward
            return step(grad, x, w, None, NUMBERS["none"], [False, True, False])[1]

        return None, 2 * with_our_pass(gradient)(*ctx.saved_tensors, grad)


def test_a_node_of_others_may_go_on_with_a_compiled_gradient():
    x = torch.randn(3, 8, dtype=torch.double)
    w = torch.randn(5, 8, dtype=torch.double, requires_grad=True)
    with tfl.accumulate_gradients(w):
        for _ in range(2):
            Doubled.apply(x, w).sum().backward()
    torch.testing.assert_close(w.grad, *torch.autograd.grad(4 * (x @ w.t()).sum(), w))


def test_graphs_compiled_before_are_traced_anew(monkeypatch):
    monkeypatch.setattr(tfl.accumulation, "was_asked_for", False)

    programs = [Program(chain, compiled=compiled) for compiled in (True, False)]
    for p in programs:
        steps(p, 1)
        with tfl.accumulate_gradients(p.model) as handle, tfl.explain() as report:
            steps(p, 2)
        assert any(call.operator == "_weight_gradient" for call in report.calls)
        handle.remove()
        steps(p, 2)
    torch.testing.assert_close(*(p.state()[0] for p in programs))


@pytest.mark.parametrize("asked_last", [torch.float32, None])
def test_graphs_of_16_bit_weights_give_gradients_of_one_dtype(asked_last):
    """Which compilers check: that of the weights asked for last. Others are added by torch."""
    ours, theirs = (Program(chain, compiled=c, dtype=torch.bfloat16) for c in (True, False))
    with tfl.accumulate_gradients(ours.model, dtype=torch.float32), tfl.explain() as report:
        tfl.accumulate_gradients(copy.deepcopy(theirs.model), dtype=asked_last)
        steps(ours)
        grads, _ = ours.state()
        ours.model.zero_grad()
    assert all(p.grad_dtype == p.dtype for p in ours.model.parameters()), "put back"
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    steps(theirs)
    torch.testing.assert_close(grads, theirs.state()[0], check_dtype=False, rtol=2e-2, atol=2e-2)
    added = [call for call in report.calls if call.operator == "_weight_gradient"]
    assert len(added) == (9 if asked_last else 0)  # three layers, three steps
    assert asked_last or "apart: the graph gives another dtype" in str(report)


def test_cuda_graphs_of_the_compiler_accumulate_as_torch_does():
    """They would go on adding to the memory that they were captured with."""
    tfl.accumulate_gradients(torch.nn.Linear(2, 2)).remove()
    assert accumulated_weights.are_wanted()
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert not accumulated_weights.are_wanted()


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_other_compilers_accumulate_as_torch_does(compiled_autograd):
    def scenario(p):
        torch._dynamo.reset()
        p.call = torch.compile(p.model, backend="aot_eager")
        with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
            steps(p)

    run_both(scenario, taken=False)


def test_threads_add_to_the_same_weights():
    """One at a time: of two that read and write at once, one would be lost."""
    layer = tfl.FusedLinear(600, 600, bias=False, dtype=torch.double)
    x = torch.ones(2, 600, dtype=torch.double)

    def work(_):
        for _ in range(40):
            layer(x).sum().backward()

    work(0)
    with tfl.accumulate_gradients(layer), ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 2.0 * 40 * 5))


# ---- dtypes -------------------------------------------------------------------------------------


def sum_of_eight(dtype, grad_dtype, accumulates, device, out=40):
    """A layer's gradients, and the root mean squares of the weight's and the bias's errors."""
    torch.manual_seed(3)
    layer = tfl.FusedLinear(48, out, dtype=dtype, device=device)
    layer.weight.grad_dtype = layer.bias.grad_dtype = grad_dtype
    exact = torch.zeros(out, 49, dtype=torch.double)
    with tfl.accumulate_gradients(layer if accumulates else []):
        for _ in range(8):
            x, g = (torch.randn(256, n).to(dtype) for n in (48, out))
            layer(x.to(device)).backward(g.to(device))
            exact += g.double().t() @ torch.cat([x.double(), torch.ones(256, 1)], 1)
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == grad_dtype
    grad = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).cpu()
    errors = (grad.double() - exact).square().split([48, 1], dim=1)
    return grad, torch.stack([of_one.mean().sqrt() for of_one in errors])


@device_param
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_fp32_sums_of_16_bit_gradients(make, device):
    """Also of biases whose sums come with a product, by one kernel that casts and adds."""
    ours, theirs = (Program(make, device, dtype=torch.bfloat16) for _ in range(2))
    for parameter in theirs.parameters:
        parameter.grad_dtype = torch.float32
    with tfl.accumulate_gradients(ours.model, dtype=torch.float32), tfl.explain() as report:
        steps(ours)
    steps(theirs)
    for p, q in zip(ours.parameters, theirs.parameters, strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=0.02)
    added = [call for call in report.calls if call.operator == "_weight_gradient"]
    assert len(added) == 3 * len(Program(make).parameters)


@device_param
@pytest.mark.parametrize("out", [40, 37])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [*((d, d) for d in LOW_DTYPES), *((d, torch.float32) for d in LOW_DTYPES[1:])],
)
def test_sums_are_at_most_as_wrong_as_torchs(dtype, grad_dtype, out, device):
    ours, error = sum_of_eight(dtype, grad_dtype, True, device, out)
    _, allowed = sum_of_eight(dtype, grad_dtype, False, device, out)
    # A bias has so few values that roundings fall better or worse by chance.
    assert (error <= torch.tensor([1.1, 1.5]) * allowed).all()
    assert torch.equal(ours, sum_of_eight(dtype, grad_dtype, True, device, out)[0])


@pytest.mark.cuda
@pytest.mark.parametrize("measured", [False, True])
def test_measuring_leaves_what_is_there(measured, cuda):
    """Candidates run many times, and must not add to the gradient."""
    with tfl.plans.budget(200 if measured else 0):
        tfl.plans.clear()
        for grad_dtype in (torch.bfloat16, torch.float32):
            _, error = sum_of_eight(torch.bfloat16, grad_dtype, True, cuda, 512)
            _, allowed = sum_of_eight(torch.bfloat16, grad_dtype, False, cuda, 512)
            assert (error <= 1.1 * allowed).all()


@pytest.mark.cuda
def test_another_stream_is_torchs(cuda):
    layer = tfl.FusedLinearReLU(16, 16, device=cuda)
    x = torch.ones(4, 16, device=cuda)
    layer(x).sum().backward()
    _kept = layer(x)  # the nodes that accumulate stay, and their stream with them
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with tfl.accumulate_gradients(layer), tfl.explain() as report, torch.cuda.stream(side):
        layer(x).sum().backward()
    torch.cuda.synchronize()
    assert "weight's gradient apart: another stream" in str(report)


@pytest.mark.cuda
def test_in_a_cuda_graph(cuda):
    layer = tfl.FusedLinearGELU(64, 64, device=cuda, dtype=torch.bfloat16)
    x = torch.randn(32, 64, device=cuda, dtype=torch.bfloat16)
    with tfl.accumulate_gradients(layer):
        for _ in range(3):
            layer(x).sum().backward()
        torch.cuda.synchronize()
        one = [p.grad.clone() / 3 for p in layer.parameters()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x).sum().backward()
        for p in layer.parameters():
            p.grad.zero_()
        for _ in range(4):
            graph.replay()
    for p, grad in zip(layer.parameters(), one, strict=True):
        torch.testing.assert_close(p.grad, 4 * grad, rtol=0.05, atol=0.05)


# ---- main_grad ----------------------------------------------------------------------------------


def with_main_grads(program):
    parameters = list(program.model.parameters())
    flat, views = flat_views(parameters)
    for p, view in zip(parameters, views):
        p.main_grad, p.grad_added_to_main_grad = view, False
    return flat


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_main_grad_is_where_sums_go(make, compiled):
    ours, theirs = Program(make, compiled=compiled), Program(make)
    with_main_grads(ours)
    with tfl.accumulate_gradients(ours.model, "main_grad"):
        steps(ours)
    steps(theirs)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        if p.dim() == 2 or not compiled:
            assert p.grad_added_to_main_grad and p.grad is None
            torch.testing.assert_close(p.main_grad, q.grad)
        else:
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_main_grad_with_megatrons_hook_on_the_accumulator(compiled):
    """Which adds what nobody has added, and takes `.grad` away."""
    program, theirs = Program(chain, compiled=compiled), Program(chain)
    flat = with_main_grads(program)
    kept = []

    def hook_of(p):
        def hook(*_):
            assert p.grad is not None
            if not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad)
            p.grad, p.grad_added_to_main_grad = None, False

        return hook

    for p in program.model.parameters():
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        kept.append((node, node.register_hook(hook_of(p))))
    with tfl.accumulate_gradients(program.model, "main_grad"):
        for each in (program, theirs):
            steps(each, 2)
            each.weights[1].register_hook(lambda g: 2 * g)
            steps(each, 1)
    expected = torch.cat([p.grad.flatten() for p in theirs.model.parameters()])
    torch.testing.assert_close(flat, expected)


def test_without_main_grad_the_gradient_is_in_grad():
    run_both(steps, into="main_grad", taken=False)


# ---- the handle ---------------------------------------------------------------------------------


def test_remove_copies_and_dead_weights():
    program = Program(chain)
    handle = tfl.accumulate_gradients(program.weights)
    said = [torch.ops.fused._accumulated(w) for w in program.weights]
    assert said == ["grad"] * 3
    copied = copy.deepcopy(program.model)
    assert {torch.ops.fused._accumulated(p) for p in copied.parameters()} == {"none"}
    with tfl.accumulate_gradients(program.weights, "main_grad"):
        assert {torch.ops.fused._accumulated(w) for w in program.weights} == {"main_grad"}
    assert [torch.ops.fused._accumulated(w) for w in program.weights] == said  # of the outer handle
    handle.remove()
    handle.remove()
    assert {torch.ops.fused._accumulated(w) for w in program.weights} == {"none"}
    halves = [torch.nn.Parameter(half) for half in torch.ones(2, 4, 4)]  # of one buffer
    with tfl.accumulate_gradients(halves[0]):
        assert [torch.ops.fused._accumulated(w) for w in halves] == ["grad", "none"]
    steps(program)
    weak = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(8)]
    for w in weak:
        torch.ops.fused._accumulate(w, "grad", True)
    del weak, w
    gc.collect()
    fresh = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(64)]
    assert {torch.ops.fused._accumulated(w) for w in fresh} == {"none"}


def test_a_view_beside_its_parameter_in_a_graph_gets_its_own_gradient():
    w, seen = torch.nn.Parameter(torch.eye(4)), []
    call = with_our_pass(lambda x, w, view: tfl.linear(torch.relu(x @ w), view).square().sum())
    with tfl.accumulate_gradients(w):
        for _ in range(2):
            view = w.view_as(w)
            view.register_hook(lambda grad: seen.append(grad.norm()))
            call(torch.ones(3, 4), w, view).backward()
    assert seen[1] == seen[0] > 0


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="into must be 'grad' or 'main_grad', got 'grads'"):
        tfl.accumulate_gradients(torch.nn.Linear(2, 2), "grads")
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or None, got torch.float64"):
        tfl.accumulate_gradients(torch.nn.Linear(2, 2), dtype=torch.float64)
    with pytest.raises(TypeError, match="expected a module or parameters, got str"):
        tfl.accumulate_gradients(["weight"])
    with pytest.raises(ValueError, match=r"expected a leaf .*, got a result of shape \[2, 2\]"):
        tfl.accumulate_gradients([torch.ones(2, 2, requires_grad=True) * 2])
    grad, x = torch.ones(3, 4), torch.ones(3, 5)
    with pytest.raises(RuntimeError, match=r"_weight_gradient: into must be \[4, 5\]"):
        torch.ops.fused._weight_gradient(grad, x, torch.ones(5, 4), True)
    with pytest.raises(RuntimeError, match=r"_weight_gradient: into must be .* without gaps"):
        torch.ops.fused._weight_gradient(grad, x, torch.ones(4, 8)[:, :5], True)
    with pytest.raises(RuntimeError, match="_weight_gradient: grad_output must have"):
        torch.ops.fused._weight_gradient(torch.ones(2, 4), x, torch.ones(4, 5), True)
    with pytest.raises(RuntimeError, match=r"_weight_gradient: into must be \[4\] .*, Double, or"):
        torch.ops.fused._weight_gradient(grad.double(), None, torch.ones(4), True)
    with pytest.raises(ValueError, match="into must be 'grad' or 'main_grad', got 'x'"):
        torch.ops.fused._accumulate(torch.ones(2, 2), "x", True)
