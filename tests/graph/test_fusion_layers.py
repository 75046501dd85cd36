"""Which layers the pass over compiled graphs finds, and which it leaves alone."""

import operator

import pytest
import torch
import torch.nn.functional as F
from fusion import check, fresh_dynamo, tanh_formula, tensors  # noqa: F401
from helpers import one_thread  # noqa: F401

import torch_fused_linear as tfl


def turned(x):
    return x.transpose(0, 1)


LAYERS = {
    "F.linear, F.relu": lambda x, w, b: F.relu(F.linear(x, w, b)),
    "torch.relu": lambda x, w, b: torch.relu(F.linear(x, w, b)),
    "method": lambda x, w, b: F.linear(x, w, b).relu(),
    "in place": lambda x, w, b: F.linear(x, w, b).relu_(),
    "in place, a function": lambda x, w, b: torch.relu_(F.linear(x, w, b)),
    "inplace=True": lambda x, w, b: F.relu(F.linear(x, w, b), inplace=True),
    "keywords": lambda x, w, b: F.relu(input=F.linear(bias=b, weight=w, input=x)),
    "no bias": lambda x, w, b: F.relu(F.linear(x, w)),
    "matmul": lambda x, w, b: F.relu(x @ w.t()),
    "matmul and sum": lambda x, w, b: F.relu(torch.matmul(x, w.T) + b),
    "sum and matmul": lambda x, w, b: F.relu(torch.add(b, x.matmul(w.mT))),
    "sum in place": lambda x, w, b: F.relu(operator.iadd(x @ w.permute(1, 0), b)),
    "linear and sum": lambda x, w, b: F.relu(F.linear(x, w) + b),
    "gelu": lambda x, w, b: F.gelu(F.linear(x, w, b)),
    "gelu tanh": lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
    "gelu written out": lambda x, w, b: tanh_formula(F.linear(x, w, b)),
    "gelu of a view": lambda x, w, b: tanh_formula(F.linear(x, w, b).flatten()),
    "through views": lambda x, w, b: F.linear(x, w, b).unsqueeze(0).reshape(-1).relu(),
    "dropout that does nothing": lambda x, w, b: F.dropout(F.linear(x, w, b), 0.0).relu(),
    "our own linear": lambda x, w, b: F.relu(tfl.linear(x, w, b)),
    "ATen": lambda x, w, b: torch.ops.aten.relu.default(torch.ops.aten.linear.default(x, w, b)),
}
FLAT_LAYERS = {
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()).relu(),
    "addmm, a method": lambda x, w, b: b.addmm(x, turned(w)).relu(),
    "addmm of a matrix as it is": lambda x, w, b: torch.addmm(b, x, w.reshape(6, 8)).relu(),
    "mm": lambda x, w, b: torch.mm(x, w.t()).relu(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_and_activation(name):
    replaced = {"linear_gelu" if "gelu" in name else "linear_relu": 1}
    for lead in [(5,), (2, 3), ()]:
        check(LAYERS[name], tensors(*lead)[:3], **replaced)
        torch._dynamo.reset()


@pytest.mark.parametrize("name", FLAT_LAYERS)
def test_layer_of_matrices(name):
    check(FLAT_LAYERS[name], tensors(5)[:3], linear_relu=1)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_its_kind(approximate):
    """The two differ by far more than rounding, and the operators' default is the other one."""
    x, w, b, *_ = (t.double() for t in tensors(50))
    backend = tfl.compile_backend("eager")
    compiled = torch.compile(
        lambda x: F.gelu(F.linear(x, w, b), approximate=approximate), backend=backend
    )
    torch.testing.assert_close(compiled(x), F.gelu(F.linear(x, w, b), approximate=approximate))
    assert backend.replaced["linear_gelu"] == 1


def pre_activation_used(x, w, b):
    z = F.linear(x, w, b)
    return F.relu(z) + z


def under_another_mode(x, w, b):
    z = F.linear(x, w, b)
    with torch.no_grad():
        y = F.relu(z)
    return y + x.sum()


def of_another_dtype(x, w, b):
    return F.linear(x, w, b).view(torch.int32).relu()


NOT_LAYERS = {
    "the pre-activation is used": pre_activation_used,
    "the activation runs without gradients": under_another_mode,
    "the bits are read as integers": of_another_dtype,
    "another activation": lambda x, w, b: F.relu6(F.linear(x, w, b)),
    "GELU by the sigmoid": lambda x, w, b: (lambda z: z * torch.sigmoid(1.702 * z))(x @ w.t()),
    "GELU with another constant": lambda x, w, b: (
        lambda z: 0.5 * z * (1.0 + torch.tanh(0.8 * (z + 0.044715 * z.pow(3.0))))
    )(x @ w.t()),
    "no activation": lambda x, w, b: F.linear(x, w, b),
    "a scaled bias": lambda x, w, b: torch.addmm(b, x, w.t(), beta=2).relu(),
    "a bias for every row": lambda x, w, b: torch.addmm(b.expand(5, 8), x, w.t()).relu(),
    "one number for a bias": lambda x, w, b: (x @ w.t() + b[:1]).relu(),
    "a scaled sum": lambda x, w, b: torch.add(x @ w.t(), b, alpha=2).relu(),
    "a batch of products": lambda x, w, b: torch.bmm(x[None], w.t()[None]).relu(),
    "a weight for each batch": lambda x, w, b: (x @ w.t().expand(2, 6, 8)).relu(),
    "a vector for a weight": lambda x, w, b: F.linear(x, w[0]).relu(),
}


@pytest.mark.parametrize("name", NOT_LAYERS)
def test_what_is_no_layer_is_left_alone(name):
    check(NOT_LAYERS[name], tensors(5)[:3])


def test_other_dtypes_are_left_alone():
    check(LAYERS["F.linear, F.relu"], tensors(5, dtype=torch.int64)[:3])


def test_tensor_subclasses_are_left_alone():
    from torch.testing._internal.two_tensor import TwoTensor

    x, w, b, *_ = (TwoTensor(t.detach(), t.detach().clone()) for t in tensors(5))
    backend = tfl.compile_backend("aot_eager")
    compiled = torch.compile(LAYERS["F.linear, F.relu"], backend=backend)
    torch.testing.assert_close(compiled(x, w, b).a, F.relu(F.linear(x, w, b)).a)
    assert not backend.replaced
