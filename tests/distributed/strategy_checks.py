"""What the ranks run to compare operators on sharded tensors with the whole computation."""

import itertools
from functools import partial

import torch
from meshes import local_of, mesh_of, mine, spread
from operators import ACTS, gated, linear
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_fused_linear as tfl

fused = torch.ops.fused
# What makes their operators: that can be sent to the ranks.
LAYERS = {a: partial(linear, a) for a in ("none", *ACTS)}
LAYERS |= {f"{a} low": partial(linear, a, memory="low") for a in ("relu", "gelu_tanh")}


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(sum(shape) + 31 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def all_placements(tensor):
    return [Replicate(), *(Shard(d) for d in range(tensor.dim())), Partial()]


def assert_close(got, want, case):
    if isinstance(got, DTensor):
        if all(type(p) in (Replicate, Shard) for p in got.placements):  # every rank checks its part
            assert got.shape == want.shape, case
            want = local_of(want, got.device_mesh, got.placements)
            got = got.to_local()
        else:
            got = got.full_tensor()
    torch.testing.assert_close(
        got.cpu(), want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{case}: {text}"
    )


def check_call(fused_call, plain_call, tensors, placements, mesh, g):
    """One call and its gradients, with the tensors placed so, beside the whole."""
    case = f"{placements} on {mesh.shape}"
    want_leaves = [t.clone().requires_grad_() for t in tensors]
    want = plain_call(*want_leaves)
    want_grads = torch.autograd.grad(want, want_leaves, g)
    leaves = [spread(t, mesh, p).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
    with torch.no_grad():
        assert_close(fused_call(*leaves), want, f"without gradients, {case}")
    got = fused_call(*leaves)
    assert_close(got.detach(), want.detach(), case)
    for where in {Replicate(), Shard(0), *(p for p in got.placements if isinstance(p, Shard))}:
        grads = torch.autograd.grad(
            got, leaves, spread(g, mesh, [where] * mesh.ndim), retain_graph=True
        )
        for k, (a, b) in enumerate(zip(grads, want_grads, strict=True)):
            assert_close(a, b, f"gradient {k} from {where}, {case}")


def check(make, shape, sizes, every=1, bias=True, policy="auto"):
    """An operator with every ``every``-th combination of its tensors' placements; their number.

    Args:
        make: gives the operator.
        shape: of the mesh.
        sizes: leading dimensions of the input, its width and the output's.
    """
    mesh, op = mesh_of(shape), make()
    case = op.case(*sizes, bias=bias)
    each = [itertools.product(all_placements(t), repeat=mesh.ndim) for t in case.inputs]
    cases = list(itertools.islice(itertools.product(*each), 0, None, every))
    with tfl.set_policy(policy):
        for placements in mine(cases, mesh):
            check_call(op.call, op.eager, case.inputs, placements, mesh, case.g)
    return len(cases)


def gated_in_parts(shape):
    """Gradients of one tensor only, and second derivatives, column and then row parallel."""
    mesh = mesh_of(shape)
    op = gated("apart", "silu", down=True, hidden=8)
    inputs = op.case((4, 3), 6, 5).inputs
    column, row, same = Shard(0), Shard(1), Replicate()
    placements = (same, column, column, row, column, column, same)
    for k in range(len(inputs)):
        ours = [spread(t, mesh, [p]) for t, p in zip(inputs, placements)]
        plain = [t.clone() for t in inputs]
        grads = []
        for leaves, call in ((ours, op.call), (plain, op.eager)):
            leaves[k].requires_grad_()
            grads += torch.autograd.grad(call(*leaves).square().sum(), leaves[k])
            grads += torch.autograd.grad(call(*leaves).square().sum(), leaves[k], create_graph=True)
            grads += torch.autograd.grad(grads[-1].square().sum(), leaves[k])
        for got, want in zip(grads[:3], grads[3:]):
            assert_close(got, want, f"leaf {k}")


def communication():
    """What a layer pair and the chain of it send, column and then row parallel."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of((4,))
    column, row, same = [Shard(0)], [Shard(1)], [Replicate()]
    x = spread(randn(2, 3, 8), mesh, same).requires_grad_()
    w = [spread(randn(16, 8), mesh, column), spread(randn(8, 16), mesh, row)]
    up = spread(randn(16, 8, seed=1), mesh, column)
    b = [spread(randn(16), mesh, column), spread(randn(8), mesh, same)]
    for t in (up, *w, *b):
        t.requires_grad_()
    ways = {
        "mlp": lambda: fused.mlp(x, w, b, "gelu_tanh"),
        "layers": lambda: fused.linear(fused.linear_gelu(x, w[0], b[0]), w[1], b[1]),
        "gated": lambda: fused.gated_mlp(x, w[0], up, w[1], b[0], b[0], b[1]),
    }
    found = {}
    for name, way in ways.items():
        with torch.no_grad(), CommDebugMode() as inference:
            way().redistribute(mesh, same)
        with CommDebugMode() as training, tfl.explain() as report:
            y = way().redistribute(mesh, same)
            y.sum().backward()
            x.grad.redistribute(mesh, same)
        found[name] = [
            {op.__name__: n for op, n in mode.get_comm_counts().items()}
            for mode in (inference, training)
        ]
        found[name] += [[(c.operator, c.shapes, c.handover) for c in report.calls]]
        x.grad = None
    return found


def frozen(shape):
    """Gradients of some of the tensors only: the others' places are filled in."""
    mesh = mesh_of(shape)
    x, w, b = randn(4, 3, 6), randn(8, 6, seed=1), randn(8, seed=2)
    g = randn(4, 3, 8, seed=3)
    cases = 0
    for activation in ("none", "relu", "gelu_erf"):
        op = linear(activation)
        for wanted in itertools.product([False, True], repeat=3):
            if not any(wanted):
                continue
            want = [t.clone().requires_grad_(on) for t, on in zip((x, w, b), wanted)]
            op.eager(*want).backward(g)
            for placements in (
                ([Replicate()], [Shard(0)], [Shard(0)]),
                ([Shard(1)], [Replicate()], [Replicate()]),
                ([Shard(2)], [Shard(1)], [Replicate()]),
            ):
                got = [
                    spread(t, mesh, p).requires_grad_(on)
                    for t, p, on in zip((x, w, b), placements, wanted, strict=True)
                ]
                op.call(*got).backward(spread(g, mesh, [Replicate()]))
                for a, c, on in zip(got, want, wanted):
                    assert (a.grad is not None) == on
                    if on:
                        assert_close(a.grad, c.grad, f"{activation} {wanted} {placements}")
                cases += 1
    return cases


def second_derivative(activation):
    mesh, op = mesh_of((2,)), linear(activation)
    x, w = randn(3, 6), randn(8, 6, seed=1)
    results = []
    for place in (lambda t, p: t.clone(), lambda t, p: spread(t, mesh, [p])):
        leaves = [place(x, Replicate()).requires_grad_(), place(w, Shard(0)).requires_grad_()]
        call = op.call if isinstance(leaves[0], DTensor) else op.eager
        (gx,) = torch.autograd.grad(call(*leaves).square().sum(), leaves[0], create_graph=True)
        results.append(torch.autograd.grad(gx.square().sum(), leaves))
    for a, b in zip(*results):
        assert_close(b, a, activation)


def known_to_dtensor():
    """The names of our operators that DTensor has been told how to run."""
    dispatcher = DTensor._op_dispatcher
    known = {*dispatcher.sharding_propagator.op_strategy_funcs, *dispatcher._custom_op_handlers}
    names = (op._schema.name.partition("::") for op in known)
    return {name for namespace, _, name in names if namespace == "fused"}
