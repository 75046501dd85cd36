"""Bad arguments: the message names the operator, what was expected and what was got.

What is bad, and of which class the error is, torch's own functions say: test_as_torch.py.
"""

import pytest
import torch
from helpers import ERRORS, device_param, op_param, policy


def _float(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


# what is wrong: (x, w, b), and what the message has to show
BAD = {
    "in_features": (lambda: (_float(5, 64), _float(128, 32), None), ["64", "128, 32"]),
    "weight transposed": (lambda: (_float(5, 64), _float(64, 128), None), ["64", "64, 128"]),
    "weight 3-D": (lambda: (_float(5, 64), _float(2, 3, 64), None), ["weight", "2, 3, 64"]),
    "input 0-D": (lambda: (_float(), _float(3, 1), None), ["input"]),
    "bias length": (lambda: (_float(5, 4), _float(6, 4), _float(7)), ["bias", "6", "7"]),
    "bias of in_features": (lambda: (_float(5, 4), _float(6, 4), _float(4)), ["bias", "6", "4"]),
    "weight dtype": (
        lambda: (_float(5, 4), _float(6, 4, dtype=torch.bfloat16), None),
        ["weight", "oat", "BFloat16|bfloat16"],
    ),
    "bias dtype": (
        lambda: (_float(5, 4), _float(6, 4), _float(6, dtype=torch.float64)),
        ["bias", "Double|double|float64"],
    ),
    "bool": (
        lambda: tuple(torch.zeros(s, 4, dtype=torch.bool) for s in (5, 6)) + (None,),
        ["input", "Bool|bool"],
    ),
}
# with gradients it is another path to the same checks; booleans cannot have any
CASES = [(wrong, training) for wrong in BAD for training in (False, True)]
CASES.remove(("bool", True))


def assert_raises(op, args, shown):
    with pytest.raises(ERRORS, match=op.name) as error:
        op.call(*args)
    message = str(error.value)
    assert "got" in message, message
    for part in shown:
        assert any(p in message for p in part.split("|")), f"{part!r} is not in: {message}"


@device_param
@op_param
@pytest.mark.parametrize("wrong, training", CASES)
def test_bad_arguments_name_op_expected_and_got(wrong, training, op, device):
    make, shown = BAD[wrong]
    args = [None if t is None else t.to(device) for t in make()]
    if training:
        args = [None if t is None else t.requires_grad_() for t in args]
    for name in ("auto", "eager"):
        with policy(name):
            assert_raises(op, args, shown)


@op_param
@pytest.mark.parametrize("wrong", ["in_features", "weight 3-D", "weight dtype"])
def test_shape_inference_checks_the_same(wrong, op):
    """On the meta device (and so under torch.compile) the same mistakes get the same message."""
    make, shown = BAD[wrong]
    assert_raises(op, [None if t is None else t.to("meta") for t in make()], shown)


@op_param
def test_mixed_devices(op):
    x, w, b = _float(5, 4), _float(6, 4), _float(6)
    for k, args in enumerate([(x, w.to("meta"), b), (x, w, b.to("meta")), (x.to("meta"), w, b)]):
        assert_raises(op, args, ["meta", "cpu", ("weight", "bias", "weight|input|bias")[k]])


@pytest.mark.cuda
@op_param
def test_mixed_real_devices(op):
    x, w, b = _float(5, 4), _float(6, 4), _float(6)
    for args in [(x, w.cuda(), b), (x.cuda(), w, b), (x.cuda(), w.cuda(), b), (x, w, b.cuda())]:
        assert_raises(op, args, ["cuda", "cpu"])


@device_param
def test_unknown_approximate(device):
    w = _float(6, 4, device=device)
    for x in (_float(5, 4, device=device), _float(5, 4, device=device).requires_grad_()):
        for unknown in ("erf", "Tanh", "", "quick"):
            with pytest.raises(ERRORS, match="linear_gelu") as error:
                torch.ops.fused.linear_gelu(x, w, approximate=unknown)
            message = str(error.value)
            assert "got" in message and unknown in message
            assert "tanh" in message and "none" in message


@device_param
@op_param
def test_an_error_leaves_the_operator_usable(op, device):
    x, w = _float(5, 4, device=device), _float(6, 4, device=device)
    with pytest.raises(ERRORS):
        op.call(x, w.t())
    assert torch.equal(op.call(x, w), torch.zeros(5, 6, device=device))
