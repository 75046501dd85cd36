"""The nodes: wanted gradients alone, what is kept and freed, hooks, checkpoints, errors."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from recipe import ACTS, HIDDEN, parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl


class Block:
    """An operator with its tensors: call(*tensors)."""

    def __init__(self, name, dtype=torch.bfloat16, activation="silu", rows=32):
        self.activation = activation
        (w, v), (b, c) = parameters([32, 48, 16], dtype)
        x = torch.randn(rows, 32, dtype=dtype, requires_grad=True)
        if name == "linear":
            self.tensors, self.names = [x, w, b], ["input", "weight"]
            self.call = lambda x, w, b: tfl.float8_linear(x, w, b, activation=activation)
        elif name == "mlp":
            self.tensors = [x, w, v, b, c]
            self.names = ["input", "weights[0]", "weights[1]"]
            self.call = lambda x, w, v, b, c: tfl.float8_mlp(x, [w, v], [b, c], activation)
        else:
            (up,), (d,) = parameters([32, 48], dtype)
            is_stacked = name == "stacked"
            gate = torch.cat([w, up]).detach().requires_grad_() if is_stacked else w
            bias = torch.cat([b, d]).detach().requires_grad_() if is_stacked else b
            self.tensors = [x, gate, v, bias, c] if is_stacked else [x, gate, up, v, bias, c, d]
            self.names = (
                ["input", "gate", "down"] if is_stacked else ["input", "gate", "up", "down"]
            )
            self.call = self._stacked if is_stacked else self._gated

    def _gated(self, x, gate, up, down, b, c, d):
        return tfl.float8_gated_mlp(x, gate, up, down, b, d, c, activation=self.activation)

    def _stacked(self, x, gate, down, b, c):
        return tfl.float8_gated_mlp(x, gate, None, down, b, None, c, activation=self.activation)

    def __call__(self):
        return self.call(*self.tensors)


CASTS = [
    getattr(torch.ops.fused, f"_float8_{name}").default for name in ("cast", "activation", "gating")
]
BLOCKS = ["linear", "mlp", "gated", "stacked"]
block_param = pytest.mark.parametrize("name", BLOCKS)


@block_param
def test_gradients_that_are_wanted_alone(name):
    """Each subset of the tensors, with the bits of all."""
    block = Block(name)
    y = block()
    grad = torch.randn_like(y)
    every = torch.autograd.grad(y, block.tensors, grad)
    count = len(block.tensors)
    some = [s for n in (1, 2, count - 1) for s in itertools.combinations(range(count), n)]
    for subset in some:
        for k, t in enumerate(block.tensors):
            t.requires_grad_(k in subset)
        wanted = [block.tensors[k] for k in subset]
        y = block()
        for got, k in zip(torch.autograd.grad(y, wanted, grad), subset, strict=True):
            assert torch.equal(got, every[k]), (subset, k)
    for t in block.tensors:
        t.requires_grad_(True)
    for k, t in enumerate(block.tensors):  # of a graph that keeps all
        (got,) = torch.autograd.grad(block(), t, grad)
        assert torch.equal(got, every[k]), k


@block_param
def test_nothing_is_recorded_without_gradients(name):
    block = Block(name)
    want = block()
    with torch.no_grad():
        y = block()
        assert y.grad_fn is None and torch.equal(y, want)
    with torch.inference_mode():
        assert torch.equal(block(), want)
    for t in block.tensors:
        t.requires_grad_(False)
    assert not block().requires_grad


@block_param
def test_name_of_the_node(name):
    operator = {"gated": "gated_mlp", "stacked": "gated_mlp"}.get(name, name)
    assert Block(name)().grad_fn.name() == f"Fused_float8_{operator}_silu_Backward"


@block_param
def test_freed_after_the_backward(name):
    block = Block(name)
    y = block()
    y.sum().backward(retain_graph=True)
    first = [t.grad.clone() for t in block.tensors]
    y.sum().backward()
    for t, g in zip(block.tensors, first):
        torch.testing.assert_close(t.grad, 2 * g)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@block_param
def test_gradients_are_not_differentiable(name):
    block = Block(name)
    y = block()
    want = torch.autograd.grad(y, block.tensors, torch.ones_like(y), retain_graph=True)
    got = torch.autograd.grad(y, block.tensors, torch.ones_like(y), create_graph=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match=r"float8_.*: its gradients cannot be differentiated"):
        got[0].sum().backward()


@block_param
def test_changed_tensors_are_refused(name):
    """As torch's layers refuse them, by the name they have in the call."""
    block = Block(name)
    weights = block.tensors[: len(block.names)]
    for what, tensor in zip(block.names, weights, strict=True):
        y = block()
        with torch.no_grad():
            tensor.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            y.sum().backward()
        assert f"{what} of float8_" in str(error.value)
    block()[0].sum().backward()


def test_frozen_weights_may_change_where_nothing_is_read_of_them():
    block = Block("mlp")
    x, w, *_ = block.tensors
    x.requires_grad_(False)
    y = block()
    with torch.no_grad():
        w.mul_(2)  # the first weight is for the input's gradient alone
    y.sum().backward()


@block_param
def test_saved_tensor_hooks(name):
    block = Block(name)
    y = block()
    grad = torch.randn_like(y)
    want = torch.autograd.grad(y, block.tensors, grad)
    packed = []

    def pack(t):
        packed.append((t.dtype, t.shape))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block()
    for a, b in zip(torch.autograd.grad(y, block.tensors, grad), want, strict=True):
        assert torch.equal(a, b)
    assert any(dtype == torch.float8_e4m3fn for dtype, _ in packed)
    with torch.autograd.graph.save_on_cpu():
        y = block()
    for a, b in zip(torch.autograd.grad(y, block.tensors, grad), want, strict=True):
        assert torch.equal(a, b)


def kept_bytes(call, parameters):
    """Those of the tensors that a node saves, but the parameters themselves."""
    kept = {}
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        call()
    return sum(
        t.nbytes for t in kept.values() if all(t.data_ptr() != p.data_ptr() for p in parameters)
    )


@pytest.mark.parametrize("activation", HIDDEN)
def test_memory_a_block_keeps(activation):
    """Bytes an element: inputs and weights 1, hidden 2, of ReLU 1 and a bit."""
    rows, sizes = 256, (64, 256, 64)
    weights, biases = parameters(sizes, torch.bfloat16)
    x = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    got = kept_bytes(lambda: tfl.float8_mlp(x, weights, biases, activation), weights)
    hidden = 256 + 256 / 8 if activation == "relu" else 2 * 256
    scales = 4 * (4 if activation == "relu" else 5)
    assert got == rows * (64 + hidden) + sum(w.numel() for w in weights) + scales
    if activation != "relu":  # of which bf16 keeps a bit and the output
        in_bf16 = kept_bytes(lambda: tfl.mlp(x, weights, biases, activation), weights)
        assert got < 0.8 * in_bf16


@pytest.mark.parametrize("activation", HIDDEN)
@pytest.mark.parametrize("is_stacked", [False, True], ids=["apart", "stacked"])
def test_memory_a_gated_block_keeps(activation, is_stacked):
    """Bytes an element: inputs and weights 1, gate and up 2 each, what goes into down none."""
    rows, features, hidden = 512, 64, 176
    (gate, down), _ = parameters((features, hidden, features), torch.bfloat16)
    (up,), _ = parameters((features, hidden), torch.bfloat16)
    weights = [gate, up, down]
    if is_stacked:
        weights = [torch.cat([gate, up]).detach().requires_grad_(), None, down]
    x = torch.randn(rows, features, dtype=torch.bfloat16, requires_grad=True)
    own = [w for w in weights if w is not None]
    got = kept_bytes(lambda: tfl.float8_gated_mlp(x, *weights, activation=activation), own)
    scales = 4 * (len(own) + 3)
    assert got == rows * (features + 4 * hidden) + sum(w.numel() for w in own) + scales

    def in_bf16():  # by torch; gated_mlp keeps four bytes as well
        gate_z, up_z = (F.linear(x, w) for w in (gate, up))
        return F.linear(ACTS[activation](gate_z) * up_z, down)

    assert got < 0.8 * kept_bytes(in_bf16, [gate, up, down])


@pytest.mark.parametrize("name", ["mlp", "gated"])
def test_columns_are_made_where_weights_train(name):
    """Frozen weights have no use for the transposed copies of their inputs."""
    block = Block(name)
    for t in block.tensors[1:]:
        t.requires_grad_(False)
    columns = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if function in CASTS:
                columns.append(made[1].numel())
            return made

    with Watch():
        block()
    weights = [t.numel() for t in block.tensors[1:] if t.dim() == 2]
    assert sorted(n for n in columns if n) == sorted(weights)  # for the input's gradient


@block_param
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(name, reentrant):
    block = Block(name)
    y = block()
    grad = torch.randn_like(y)
    want = torch.autograd.grad(y, block.tensors, grad)
    y = checkpoint(block.call, *block.tensors, use_reentrant=reentrant)
    y.backward(grad)
    for t, b in zip(block.tensors, want, strict=True):
        assert torch.equal(t.grad, b)


@block_param
def test_gradients_add_up(name):
    block = Block(name, dtype=torch.float32)
    for _ in range(3):
        block().sum().backward()
    three = [t.grad.clone() for t in block.tensors]
    for t in block.tensors:
        t.grad = None
    block().sum().backward()
    for t, want in zip(block.tensors, three, strict=True):
        torch.testing.assert_close(3 * t.grad, want)


@block_param
def test_weights_that_are_asked_to_accumulate_do_it_torchs_way(name):
    block = Block(name)
    block().sum().backward()
    want = [t.grad.clone() for t in block.tensors]
    weight = block.tensors[1]
    torch.ops.fused._accumulate(weight, "grad", True)
    try:
        block().sum().backward()
    finally:
        torch.ops.fused._accumulate(weight, "grad", False)
    for t, b in zip(block.tensors, want, strict=True):
        torch.testing.assert_close(t.grad, 2 * b)


@block_param
def test_backward_under_autocast(name):
    block = Block(name)
    y = block()
    grad = torch.randn_like(y)
    want = torch.autograd.grad(y, block.tensors, grad, retain_graph=True)
    with torch.autocast("cpu", torch.float16):
        got = torch.autograd.grad(y, block.tensors, grad)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@block_param
@pytest.mark.parametrize("form", ["expanded", "transposed"])
def test_gradients_of_other_strides(name, form):
    block = Block(name)
    y = block()
    if form == "expanded":
        grad = torch.randn(1, y.shape[1], dtype=y.dtype).expand(y.shape)
    else:
        grad = torch.randn(y.shape[1], y.shape[0], dtype=y.dtype).t()
    want = torch.autograd.grad(y, block.tensors, grad.contiguous(), retain_graph=True)
    for a, b in zip(torch.autograd.grad(y, block.tensors, grad), want, strict=True):
        assert torch.equal(a, b)


def test_threads_of_backwards_share_weights():
    block = Block("mlp", dtype=torch.float32)
    inputs = [torch.randn(32, 32) for _ in range(4)]
    for x in inputs:
        block.call(x, *block.tensors[1:]).sum().backward()
    want = [t.grad.clone() for t in block.tensors[1:]]
    for t in block.tensors:
        t.grad = None
    outputs = [block.call(x, *block.tensors[1:]).sum() for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda y: y.backward(), outputs))
    for t, b in zip(block.tensors[1:], want, strict=True):
        torch.testing.assert_close(t.grad, b)
