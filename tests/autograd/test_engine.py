"""The nodes in torch's engine: which gradients they return, when, to whom, and their errors."""

import operators as ops
import pytest
import torch
import torch.nn.functional as F
from numerics import assert_bits, assert_same, run
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from watching import Calls, operators_of

import torch_fused_linear as tfl

HALF = torch.float16


# --- which gradients -----------------------------------------------------------------------------


@ops.every_op
@ops.policy_param
def test_only_wanted_gradients_come_back(policy, op, device):
    """By requires_grad, by backward(inputs=...) and by autograd.grad, each as eager has it."""
    kinds = [((2,), torch.float64, True), ((2,), torch.float64, False)]
    if op in ops.OPS:
        kinds += [((), torch.float32, True), ((5,), torch.bfloat16, True), ((2, 3), HALF, True)]
    for lead, dtype, bias in kinds:
        case = op.smooth_case(lead, 4, 5, dtype, device, bias)
        want = run(op.eager, case)[1:]
        for wanted in ops.subsets(len(case.inputs)):
            expected = [g if r else None for g, r in zip(want, wanted)]
            with tfl.set_policy(policy):
                leaves = case.leaves(wanted)
                y = op.call(*leaves)
                assert y.requires_grad == any(wanted)
                if not any(wanted):
                    continue
                y.backward(case.g)
                assert_same([leaf.grad for leaf in leaves], expected, f"{lead} {wanted}")
                leaves = case.leaves()
                chosen = [leaf for leaf, r in zip(leaves, wanted) if r]
                y = op.call(*leaves)
                y.backward(case.g, inputs=chosen, retain_graph=True)
                assert_same([leaf.grad for leaf in leaves], expected, f"{lead} inputs {wanted}")
                got = torch.autograd.grad(y, chosen, case.g)
            assert_same(got, [g for g in expected if g is not None], f"{lead} asked {wanted}")


def backward_steps(call, case, wanted=None):
    y = call(*case.leaves(wanted))
    with Calls() as calls:
        y.backward(case.g)
    kinds = ("fused::", "aten::addmm", "aten::mm", "aten::convolution_backward")
    pairs = zip(calls.names, calls.arguments)
    return [(n.partition("::")[2], args) for n, args in pairs if n.startswith(kinds)]


def test_steps_of_a_blocks_backward():
    """One pass over memory; dx of two products is one sum; nothing for what is frozen."""
    op = ops.gated("apart", "silu", down=True, hidden=8)
    case = op.case((5,), 6, 4)
    names = ["x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias"]

    def steps(*asked):
        wanted = [name in asked for name in names] if asked else None
        return [name for name, _ in backward_steps(op.call, case, wanted)]

    everything = steps()
    assert everything.count("_glu_backward") == 1 and "_glu" not in everything
    assert everything.count("mm") == 1 and everything.count("_linear_backward") == 4
    assert "mm" not in steps("gate", "up")
    assert steps("down_bias") == ["_linear_backward"]
    for form in ("stacked", "halves"):
        op = ops.gated(form, "silu", down=True, hidden=8)
        case = op.case((5,), 6, 4)
        y = op.call(*case.leaves())
        ran = operators_of(lambda y=y, g=case.g: y.backward(g), "operator", "path")
        names = [name for name, _ in ran]
        assert names.count("_glu_backward") == 1
        assert names.count("_linear_backward") == 3, "dh; dx and both weights; down's weight"
        assert not any("addmm" in path for _, path in ran)


def test_below_the_lowest_layer_with_anything_to_do_no_step_runs(device):
    op = ops.mlp("relu", 4)
    case = op.case((3,), 4, 8, device=device)
    upper = [False] * 3 + [True, True] + [False] * 4
    names = [name for name, _ in backward_steps(op.call, case, upper)]
    assert len(names) == 2, names
    across = [name for name, _ in backward_steps(op.call, case)]
    assert across == ["_linear_backward_across"] * 3 + ["_linear_backward"]


@ops.every_op
def test_arguments_are_left_alone(op, device):
    case = op.case((5,), 7, 9, torch.float32, device)
    tensors = [*case.inputs, case.g]
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    run(op.call, case)
    assert_bits(tensors, before)
    assert [t._version for t in tensors] == versions


# --- again, differentiable, not at all -----------------------------------------------------------


@ops.every_op
@ops.policy_param
def test_a_graph_that_is_kept_and_then_freed(policy, op, device):
    case = op.smooth_case((2,), device=device)
    with tfl.set_policy(policy):
        want = run(op.call, case)[1:]
        leaves = case.leaves()
        y = op.call(*leaves)
        for _ in range(2):
            y.backward(case.g, retain_graph=True)
        assert_bits([leaf.grad for leaf in leaves], [2 * g for g in want])
        assert_same(torch.autograd.grad(y, leaves, case.g, create_graph=True), want)
        torch.autograd.grad(y, leaves, case.g)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(y, leaves, case.g)


def test_a_second_head_whose_producer_was_freed(device):
    case = ops.GELU_TANH.case(device=device)
    y = ops.GELU_TANH.call(*case.leaves())
    heads = [ops.LINEAR.call(y, case.w.mT.contiguous()).sum() for _ in range(2)]
    heads[0].backward()
    with pytest.raises(RuntimeError, match="a second time"):
        heads[1].backward()


@ops.every_op
def test_inference_mode(op, device):
    case = op.smooth_case((2,), device=device)
    leaves, want = case.leaves(), op.eager(*case.inputs)
    with torch.inference_mode():
        y = op.call(*leaves)
        assert y.is_inference() and not y.requires_grad
        x = case.x.clone()
    # an inference tensor may be an input where no gradient is wanted
    assert_same([y, op.call(x, *case.inputs[1:])], [want, want])


class _NoGradient(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: None)


@ops.every_op
def test_a_consumer_may_return_no_gradient(op, device):
    leaves = op.smooth_case((2,), device=device).leaves()
    (_NoGradient.apply(op.call(*leaves)).sum() + leaves[0].sum()).backward()
    assert torch.equal(leaves[0].grad, torch.ones_like(leaves[0]))
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves[1:])


# --- hooks, nodes --------------------------------------------------------------------------------


@ops.every_op
def test_hooks_see_the_true_gradient(op, device):
    """dL/dy and not dL/dz, on tensors and nodes, also between two of our layers."""
    case = op.smooth_case((2,), device=device)
    width = case.g.shape[-1]

    def watched(call, last):
        seen, leaves = [], case.leaves()
        x = leaves[0] * 2
        y = call(x, *leaves[1:])
        for tensor in (x, y):
            tensor.register_hook(lambda g: seen.append(g.clone()))
        y.grad_fn.register_prehook(lambda grads: seen.append(grads[0].clone()))
        weight = torch.linspace(-1, 1, width * width).view(width, width).to(y)
        middle = last(y, weight)
        middle.retain_grad()
        middle.register_hook(lambda g: g * 2)
        last(middle, weight.cos()).square().sum().backward()
        return [*seen, middle.grad, *(leaf.grad for leaf in leaves)]

    assert_same(watched(op.call, ops.LINEAR.call), watched(op.eager, ops.LINEAR.eager))


def test_names_of_nodes():
    for op in ops.OPS:
        assert op.call(*op.case().leaves()).grad_fn.name() == f"FusedLinear_{op!r}_Backward"
    for op, name in (
        (ops.gated("apart", "silu"), "FusedLinearGlu_silu_Backward"),
        (ops.gated("apart", "relu", down=True), "FusedGatedMlp_relu_Backward"),
        (ops.mlp("relu", 2), "FusedMlpBackward"),
        (ops.CONV, "FusedConv2dReluBackward"),
    ):
        assert op.call(*op.case().leaves()).grad_fn.name() == name


@ops.rows(ops.OPS[1:])
def test_a_node_that_a_hook_calls_by_hand(op, device):
    """It is not the node that the engine runs, and has neither that one's edges nor its notes."""
    case, got = op.case(device=device), []
    leaves = case.leaves()
    y = op.call(*leaves)
    out = ops.LINEAR.call(op.call(*leaves), leaves[1].mT)
    out.register_hook(lambda _: got.extend(y.grad_fn(case.g)))
    out.sum().backward()
    assert_same(got, run(op.eager, case)[1:])


@ops.op_param
def test_a_node_called_outside_the_engine_can_be_differentiated(op, device):
    case = op.case(device=device)
    leaves, g = case.leaves(), case.g.clone().requires_grad_()
    direct = op.call(*leaves).grad_fn(g)
    first = torch.autograd.grad(op.eager(*leaves), leaves, g, create_graph=True)
    assert_same(direct, first)
    then = (sum(t.sin().sum() for t in ts) for ts in (direct, first))
    assert_same(*(torch.autograd.grad(t, [*leaves, g], allow_unused=True) for t in then))


@pytest.mark.parametrize("label", ["silu", "glu apart silu", "block apart silu", "mlp relu of 3"])
def test_a_sparse_gradient_arrives(label):
    """Torch's own backward takes it where its operators do; here its values count."""
    (op,) = (op for op in ops.EVERY if op.label == label)
    case, results = op.case((4,), 5, 5), []
    for sparse in (True, False):
        leaves = case.leaves()
        index = torch.tensor([[0], [3], [1], [4]])
        picked = torch.gather(op.call(*leaves), 1, index, sparse_grad=sparse)
        results.append(torch.autograd.grad(picked.sum(), leaves))
    assert_same(*results)


# --- writes to what is kept ----------------------------------------------------------------------


@ops.every_op
def test_a_write_to_what_is_kept_is_torchs_error(op, device):
    """And to what is not kept, the biases, it is none, but up's where its product is made again."""
    case = op.smooth_case((2,), device=device)
    want = run(op.eager, case)[1:]
    kept = [*range(len(case.inputs) - op.biases)] + [5] * (op.label == "block apart silu low")
    for k in range(len(case.inputs)):
        leaves = case.leaves()
        y = op.call(*leaves)
        with torch.no_grad():
            leaves[k].mul_(2)
        if k not in kept:
            assert_same(torch.autograd.grad(y, leaves, case.g), want)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(y, leaves, case.g)


@ops.every_op
def test_a_write_to_the_output(op, device):
    """ReLU reads it again, unless it keeps bits; for the rest it is as any other tensor."""
    case = op.smooth_case((2,), device=device)
    leaves = case.leaves()
    y = op.call(*leaves)
    if op in (ops.RELU, ops.CONV):
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        want = [2 * g for g in run(op.eager, case)[1:]]
        assert_same(torch.autograd.grad(y.mul_(2), leaves, case.g), want)


@ops.rows([ops.mlp(activation, 3, (4, 4)) for activation in ("relu", "gelu_tanh")])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_write_to_what_is_not_needed(create_graph, op, device):
    """The lowest weight, where only the upper layers' gradients are asked for."""
    case, results = op.case((2,), 4, 4, device=device), []
    for call in (op.call, op.eager):
        leaves = case.leaves()
        lowest = leaves[1].clone()
        y = call(leaves[0], lowest, *leaves[2:])
        lowest.mul_(1)  # counts as written to; the values are those of before
        wanted = [leaves[3], leaves[6], leaves[5]]
        results.append(torch.autograd.grad(y.cos().sum(), wanted, create_graph=create_graph))
    assert_same(*results)


@pytest.mark.parametrize("change", [lambda data: data * 3, torch.Tensor.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@ops.rows([op for op in ops.EVERY if op is not ops.CONV and "up first" not in op.label])
def test_another_tensor_put_into_a_weight_is_not_read(op, frozen, change):
    def gradients(call, lead):
        case = op.case(lead, 8, 8, bias=False)
        x = case.x.requires_grad_()
        weights = [nn.Parameter(t, requires_grad=not frozen) for t in case.inputs[1:]]
        y = call(x, *weights)
        for weight in weights:
            weight.data = change(weight.data)
        y.square().sum().backward()
        return [x.grad, *(weight.grad for weight in weights)]

    for lead in ((5,), (2, 3)):
        assert_same(gradients(op.call, lead), gradients(op.eager, lead))


@ops.rows([op for op in ops.EVERY if "low" not in op.label])
def test_another_tensor_put_into_the_input_is_read_where_torch_reads_it(op):
    """A buffer that is filled anew: torch keeps a matrix itself, of other inputs a view."""

    def gradients(call, lead):
        x, *others = op.case(lead, 8, 8).leaves()
        x = x.detach()
        y = call(x, *others)
        x.data = torch.zeros_like(x)
        return torch.autograd.grad(y.square().sum(), others)

    for lead in ((), (5,), (2, 3)):
        assert_same(gradients(op.call, lead), gradients(op.eager, lead))


# --- what is saved passes through hooks ----------------------------------------------------------


@ops.every_op
@ops.policy_param
def test_saved_tensors_elsewhere(policy, op, device):
    """All that is saved passes through the hooks (offloading, compression), and is asked for once
    in a backward; halves that were moved are neighbours no longer."""
    case, asked = op.smooth_case((4,), 5, 6, device=device), []

    def pack(t):
        asked.append(0)
        return len(asked) - 1, t.cpu().contiguous().numpy().copy(), t.device

    def unpack(packed):
        k, array, home = packed
        asked[k] += 1
        return torch.from_numpy(array).to(home)

    with tfl.set_policy(policy):
        want = run(op.call, case)[1:]
        leaves = case.leaves()
        with saved_tensors_hooks(pack, unpack):
            y = op.call(*leaves)
        for times in (1, 2):
            assert_same(torch.autograd.grad(y, leaves, case.g, retain_graph=times == 1), want)
            assert max(asked) == times


@ops.every_op
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint(reentrant, op, device):
    case = op.smooth_case((2,), device=device)
    leaves, want = case.leaves(), run(op.call, case)
    y = checkpoint(op.call, *leaves, use_reentrant=reentrant)
    y.backward(case.g)
    assert_same([y, *(leaf.grad for leaf in leaves)], want)


@pytest.mark.parametrize("memory", ["default", "low"])
def test_a_checkpoint_of_a_chain_that_is_frozen_below(memory):
    model = tfl.FusedMLP(4, 4, 4, 4, memory=memory, activation="silu").double()
    model[0].requires_grad_(False)
    x = torch.randn(3, 4, dtype=torch.double)
    weights = [p for p in model.parameters() if p.dim() == 2 and p.requires_grad]
    found = []
    for y in (checkpoint(model, x, use_reentrant=False), model(x)):
        grads = torch.autograd.grad(y.square().sum(), weights, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), weights))
    assert_same(*found)


@pytest.mark.parametrize("features", [16, 64, 200])
@pytest.mark.parametrize("name", ["half", "bfloat16", "double"])
def test_bits_that_hooks_give_back_in_another_dtype(name, features):
    weight = torch.randn(features, 16).bfloat16().float()  # so that no hook rounds it
    both, grads = [weight, torch.eye(features)], []  # which are frozen
    for call in (
        lambda x: F.relu(F.linear(x, weight)),
        lambda x: tfl.linear_relu(x, weight, memory="low"),
        lambda x: tfl.mlp(x, both, [None] * 2, activation="relu", memory="low"),
    ):
        x = torch.ones(2, 16, requires_grad=True)
        with saved_tensors_hooks(getattr(torch.Tensor, name), torch.Tensor.float):
            y = call(x)
        y.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads, grads[:1] * 3)


def test_bits_that_hooks_lose_are_an_error():
    x = torch.ones(2, 16, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, torch.Tensor.int):
        y = tfl.linear_relu(x, torch.ones(16, 16), memory="low")
    with pytest.raises(RuntimeError, match=r"expected ReLU's bits .* got Int"):
        y.sum().backward()
