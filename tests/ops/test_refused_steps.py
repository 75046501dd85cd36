"""Private operators that are called with anything: an error that names them, never a read beyond a
tensor's end. The nodes call them with checked tensors, and Python can call them with any."""

from contextlib import nullcontext

import operators as ops
import pytest
import torch
from steps import STEPS

from torch_fused_linear.activations import NUMBERS

fused = torch.ops.fused
NONE, RELU, SILU = (NUMBERS[name] for name in ("none", "relu", "silu"))
ALL, FIVE = [True] * 3, [True, True, True, True, True]


class Step:
    """Arguments that fit, tensors by their shapes, and shapes of one argument that do not."""

    def __init__(self, name, *fits, label="", **wrong):
        self.name, self.fits, self.wrong = name, fits, wrong
        self.label = f"{name} {label}".strip()
        self.arguments = [a.name for a in getattr(fused, name).default._schema.arguments]

    def given(self, device, dtype=torch.float32, **others):
        shapes = {**dict(zip(self.arguments, self.fits)), **others}
        return [
            torch.ones(a, device=device, dtype=dtype) if isinstance(a, tuple) else a
            for a in shapes.values()
        ]

    def tensors(self):
        return [name for name, a in zip(self.arguments, self.fits) if isinstance(a, tuple)]

    def activations(self):
        return [name for name in self.arguments if name.endswith("activation")]


X, W, B, G = (3, 4), (6, 4), (6,), (3, 6)
LAYER = {"input": [(3, 5), ()], "weight": [(6, 5), (6,), (1, 6, 4)], "bias": [(5,), (1, 6), ()]}
BACKWARD = {
    "grad_output": [(3, 5), (2, 6), (6,), (1, 3, 6), ()],
    "input": [(3, 5), (2, 4), (4,), ()],
    "weight": [(5, 4), (6, 5), (6,), (1, 6, 4), ()],
    "saved": [(3, 5), (2, 6), (6,), ()],
}
GATED = {"gate": [(6, 5), (5, 4), (6,)], "up": [(6, 5), (5, 4), (6,)], "gate_bias": [(5,)]}
IMAGE = (2, 4, 7, 6)
IMAGES = [(2, 4, 7, 5), (4, 7, 6), ()]
CASES = [
    Step("_linear_aux", X, W, B, RELU, **LAYER),
    Step("_linear_relu_bits", X, W, B, **LAYER),
    Step("_relu_mask", G, output=[()]),
    Step("_activation_backward", G, G, SILU, True, grad_output=[(3, 5), ()], saved=[(2, 6), ()]),
    Step("_linear_backward", G, X, W, G, SILU, ALL, **BACKWARD),
    Step("_linear_backward", G, X, W, G, RELU, ALL, label="ReLU", **BACKWARD),
    Step(
        "_linear_backward", (2, 3, 6), (2, 3, 4), (2, 6, 4), (2, 3, 6), SILU, ALL,
        label="of an ensemble", grad_output=[(2, 3, 5), G, ()], input=[(2, 3, 5), (1, 3, 4), X],
        weight=[(2, 5, 4), (1, 6, 4), (2, 6, 4, 1)], saved=[(2, 3, 5), (1, 3, 6), G],
    ),
    Step(
        "_linear_backward_across", G, X, W, G, SILU, ALL, X, RELU, True,
        previous_saved=[(3, 5), (2, 4), (4,), ()], **BACKWARD,
    ),
    Step(
        "_linear_backward_across", (2, 3, 6), (2, 3, 4), W, None, NONE, ALL, (2, 3, 4), RELU, True,
        label="of no ensemble", weight=[(2, 6, 4)],
    ),
    Step(
        "_weight_gradient", G, X, W, True,
        grad_output=[(2, 6), ()], input=[(2, 4), ()], into=[(6, 5), (5, 4), (6,), ()],
    ),
    Step("_weight_gradient", G, None, B, True, label="of a bias", into=[(5,), W, ()]),
    Step(
        "_ensemble_linear", (2, 3, 4), (2, 6, 4), (2, 6), RELU,
        input=[(2, 3, 5), (1, 3, 4), X, ()], weight=[(2, 6, 5), (1, 6, 4), W, ()],
        bias=[(2, 5), (6,), ()],
    ),
    Step("_linear_glu_aux", X, W, W, B, B, SILU, True, input=[(3, 5), ()], **GATED),
    Step("_glu", G, G, SILU, gate=[(3, 5), (2, 6), ()], up=[(3, 5), (6,), ()]),
    Step("_glu", G, None, SILU, label="of one tensor", gate=[(3, 5), ()]),
    Step(
        "_glu_backward", (3, 3), G, G, SILU, FIVE, (3, 6),
        grad_output=[(3, 5), (2, 3), ()], gate=[(3, 5), ()], up=[(3, 5), (2, 6), ()],
        down=[(3, 5), (5, 6), (6,), ()],
    ),
    Step("_channels_relu_backward", IMAGE, IMAGE, True, grad_output=IMAGES, output=IMAGES),
]  # fmt: skip
case_param = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


def wants_gradients(args):
    return [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]


def without(args):
    return args


MODES = {
    "plain": (nullcontext, without),
    "gradients": (nullcontext, wants_gradients),
    "inference": (torch.inference_mode, without),  # no Autograd key is on the way
    "below autograd": (torch._C._AutoDispatchBelowAutograd, without),
}
mode_param = pytest.mark.parametrize("mode", MODES)
place_param = pytest.mark.parametrize("place", ["real", "meta"])


def refused(case, args, mode, what):
    with MODES[mode][0](), pytest.raises(ops.ERRORS) as caught:
        getattr(fused, case.name)(*MODES[mode][1](args))
        pytest.fail(f"{case.label} took {what}")
    return str(caught.value)


def test_all_steps_are_tried():
    assert {case.name for case in CASES} == STEPS.keys()


@case_param
@mode_param
@place_param
def test_tensors_that_do_not_fit(place, mode, case, device):
    place = device if place == "real" else torch.device("meta")
    if mode == "gradients" and case.name == "_weight_gradient":
        pytest.skip("it writes to what it is given")
    with MODES[mode][0]():
        getattr(fused, case.name)(*case.given(place))  # these fit
    words = "" if case.name == "_linear_glu_aux" else case.name  # its layers and passes speak
    for name, shapes in case.wrong.items():
        assert name in case.tensors()
        for shape in shapes:
            what = f"{name} {shape}"
            assert words in refused(case, case.given(place, **{name: shape}), mode, what), what
    assert words in refused(case, case.given(place, torch.bool), "plain", "bool")
    elsewhere = torch.device("cpu") if place.type == "meta" else torch.device("meta")
    for k, name in enumerate(case.arguments):
        if len(case.tensors()) == 1 or name not in case.tensors():
            continue
        for changed in ({"dtype": torch.double}, {"device": elsewhere}):
            if "dtype" in changed and not words and name.endswith("bias"):
                continue  # torch's own linear takes it without data
            args = case.given(place)
            args[k] = torch.ones(case.fits[k], **{"device": place, **changed})
            assert words in refused(case, args, mode, f"{name} of {changed}")


@case_param
@mode_param
@place_param
def test_numbers_of_no_activation(place, mode, case, device):
    place = device if place == "real" else torch.device("meta")
    takes_none = "_activation_backward", "_linear_backward", "_linear_backward_across"
    for name in case.activations():
        optional = case.name in takes_none and name == "activation"
        optional = optional or case.name == "_ensemble_linear"
        least = 0 if optional else 1
        for number in (-1, 6, 2**40, -(2**63), *range(least)):
            text = refused(case, case.given(place, **{name: number}), mode, f"{name} {number}")
            assert f"{case.name}: {name} must be a number from {least} to 5, got {number}" in text


def test_a_number_is_asked_for():
    """The texts of public operators are none of a step's."""
    for case in CASES:
        for name in case.activations():
            with pytest.raises(RuntimeError, match="Expected a value of type 'int'"):
                getattr(fused, case.name)(*case.given("cpu", **{name: "relu"}))


def test_addresses_that_are_none(device):
    """Storages, which the accumulation of a compiled graph's gradients reads."""
    x, w, g = (torch.ones(shape, device=device) for shape in (X, W, G))
    step = fused._accumulated_weight_gradient
    step(g, x, w, torch.float32, torch.zeros(2, dtype=torch.int64))
    for wrong in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)[:, 0]):
        with pytest.raises(RuntimeError, match="_accumulated_weight_gradient: storages must be"):
            step(g, x, w, torch.float32, wrong)


@pytest.mark.cuda
def test_a_network_in_one_launch(cuda):
    x, w, v, b = (torch.ones(s, device=cuda) for s in (X, W, (5, 6), B))
    step = fused._mlp_in_one
    step(x, [w, v], [b, None], RELU)
    for weights, biases in (([v, w], [None] * 2), ([w, v], [None, b]), ([w, v], [b]), ([], [])):
        with pytest.raises(ops.ERRORS, match="_mlp_in_one"):
            step(x, weights, biases, RELU)
    for number in (-1, 0, 6):
        with pytest.raises(ValueError, match=f"_mlp_in_one: activation must be .* got {number}"):
            step(x, [w, v], [b, None], number)
