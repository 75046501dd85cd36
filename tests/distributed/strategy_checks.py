"""Functions that the ranks run to compare operators on sharded tensors with one process."""

import itertools
from functools import partial

import torch
from meshes import local_of, mesh_of, mine, spread
from operators import ACTS, linear
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_fused_linear as tfl

fused = torch.ops.fused
# The functions that make the operators; they can be sent to the ranks.
LAYERS = {a: partial(linear, a) for a in ("none", *ACTS)}
LAYERS |= {f"{a} low": partial(linear, a, memory="low") for a in ("relu", "gelu_tanh")}


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(sum(shape) + 31 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


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


def check_call(op, tensors, placements, mesh, g, wanted=None):
    """One call and its gradients, all or those wanted, with the tensors placed so, beside the
    whole."""
    wanted = wanted or [True] * len(tensors)
    case = f"{op!r} {wanted} {placements} on {mesh.shape}"
    whole = [t.clone().requires_grad_(on) for t, on in zip(tensors, wanted)]
    want = op.eager(*whole)
    want_grads = torch.autograd.grad(want, [t for t in whole if t.requires_grad], g)
    placed = zip(tensors, placements, wanted, strict=True)
    leaves = [spread(t, mesh, p).requires_grad_(on) for t, p, on in placed]
    with torch.no_grad():
        assert_close(op.call(*leaves), want, f"without gradients, {case}")
    got = op.call(*leaves)
    assert_close(got.detach(), want.detach(), case)
    for where in {Replicate(), Shard(0), *(p for p in got.placements if isinstance(p, Shard))}:
        arrives = spread(g, mesh, [where] * mesh.ndim)
        needed = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(got, needed, arrives, retain_graph=True)
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
    each = [[Replicate(), *map(Shard, range(t.dim())), Partial()] for t in case.inputs]
    each = [itertools.product(placements, repeat=mesh.ndim) for placements in each]
    cases = list(itertools.islice(itertools.product(*each), 0, None, every))
    with tfl.set_policy(policy):
        for placements in mine(cases, mesh):
            check_call(op, case.inputs, placements, mesh, case.g)
    return len(cases)


def derivatives(make, sizes, placements):
    """First and second ones of each tensor alone, and of all, beside the whole computation's."""
    mesh, op = mesh_of((2,)), make()
    inputs = op.case(*sizes).inputs
    for wanted in [*([k] for k in range(len(inputs))), range(len(inputs))]:
        results = []
        placed = [spread(t, mesh, [p]) for t, p in zip(inputs, placements, strict=True)]
        for call, leaves in ((op.call, placed), (op.eager, [t.clone() for t in inputs])):
            chosen = [leaves[k].requires_grad_() for k in wanted]
            first = torch.autograd.grad(call(*leaves).square().sum(), chosen)
            again = torch.autograd.grad(call(*leaves).square().sum(), chosen[0], create_graph=True)
            second = torch.autograd.grad(again[0].square().sum(), chosen)
            results.append([*first, *again, *second])
        for k, (got, want) in enumerate(zip(*results, strict=True)):
            assert_close(got, want, f"{op!r}, of {list(wanted)}: result {k}")


def communication():
    """The collectives of a pair of layers and of its chain, column and then row parallel."""
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
            way().redistribute(mesh, same).sum().backward()
            x.grad.redistribute(mesh, same)
        found[name] = [
            {op.__name__: n for op, n in mode.get_comm_counts().items()}
            for mode in (inference, training)
        ]
        found[name] += [[(c.operator, c.shapes) for c in report.calls]]
        x.grad = None
    return found


def frozen(activation):
    """Gradients of some of the tensors only: the others' places are filled in."""
    mesh, op = mesh_of((2,)), linear(activation)
    case = op.case((4, 3), 6, 8)
    for wanted in itertools.product([False, True], repeat=3):
        for placements in (
            ([Replicate()], [Shard(0)], [Shard(0)]),
            ([Shard(1)], [Replicate()], [Replicate()]),
            ([Shard(2)], [Shard(1)], [Replicate()]),
        ):
            if any(wanted):
                check_call(op, case.inputs, placements, mesh, case.g, wanted)


def known_to_dtensor():
    """The names of our operators that DTensor has been told how to run."""
    dispatcher = DTensor._op_dispatcher
    known = {*dispatcher.sharding_propagator.op_strategy_funcs, *dispatcher._custom_op_handlers}
    names = (op._schema.name.partition("::") for op in known)
    return {name for namespace, _, name in names if namespace == "fused"}
