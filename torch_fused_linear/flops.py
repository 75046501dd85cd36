"""FLOPs of the operators for :class:`torch.utils.flop_counter.FlopCounterMode`.

They are counted as PyTorch counts its own, so that a fused model has exactly the count of the plain
one: two for each multiplication and addition of a matrix product, none for biases and activations.

``FORMULAS`` also names the operators whose results a policy of selective activation checkpointing
(:func:`torch.utils.checkpoint.create_selective_checkpoint_contexts`) keeps, if it keeps products::

    def policy(context, op, *args, **kwargs):
        if op.namespace == "fused" and op.overloadpacket.__name__ in flops.FORMULAS:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

Such a policy sees the operators below autograd. For ``fused::mlp`` it sees those of the layers:
``fused::linear``, ``fused::linear_relu`` and, for other activations (and for ReLU under the policy
``"cublaslt"`` in eager mode), ``fused::_linear_aux``, whose second result is what the backward
reads. If a width is no multiple of 8, or the memory is ``'low'``, it sees ``fused::linear`` and
ATen's activation.
"""

from math import prod

import torch

from ._support.when_imported import when_imported
from .activations import OPERATORS

__all__ = ["FORMULAS", "register"]


def linear(input, weight, *args, **kwargs) -> int:
    """Counts one layer's forward from the shapes of its arguments."""
    return 2 * prod(input) * weight[0]


def mlp(input, weights, *args, **kwargs) -> int:
    """Counts the forward of layers in a chain."""
    return sum(2 * prod(input[:-1]) * prod(weight) for weight in weights)


def linear_backward(grad_output, input, weight, saved, activation, output_mask, **kwargs) -> int:
    """Counts one layer's backward: a product for the input's gradient, one for the weight's."""
    return linear(input, weight) * (bool(output_mask[0]) + bool(output_mask[1]))


def linear_backward_across(
    grad_output, input, weight, saved, activation, output_mask, *args, **kwargs
) -> int:
    """Counts a layer's backward in which the input's gradient is always computed."""
    return linear(input, weight) * (1 + bool(output_mask[1]))


def weight_gradient(grad_output, input, into, *args, **kwargs) -> int:
    """Counts a weight's gradient that is added to an existing one; without input a bias's."""
    return linear(input, into) if input else 0


def linear_glu(input, gate, up=None, *args, **kwargs) -> int:
    """Counts a gated layer's forward: its two products, or one with both weights."""
    return linear(input, gate) + (0 if up is None else linear(input, up))


def gated_mlp(input, gate, up, down, *args, **kwargs) -> int:
    """Counts a gated block's forward."""
    return linear_glu(input, gate, up) + 2 * prod(input[:-1]) * prod(down)


def glu_backward(grad_output, *args, down=None, out_shape, **kwargs) -> int:
    """Counts the product with `down`, which is given last, if at all."""
    down = args[4] if len(args) > 4 else down
    return 0 if down is None else 2 * prod(grad_output[:-1]) * prod(down)


def conv2d_relu(input, weight, *args, out_shape, **kwargs) -> int:
    """Counts a convolution's forward; PyTorch counts ``aten::convolution_backward`` itself."""
    return 2 * prod(out_shape) * prod(weight[1:])


def float8_product(a, b, *args, **kwargs) -> int:
    """Counts a product of [M, K] with [N, K]."""
    return 2 * prod(a) * b[0]


FORMULAS = {
    **dict.fromkeys(("linear", *OPERATORS, "_linear_aux", "_linear_relu_bits"), linear),
    "mlp": mlp,
    "linear_glu": linear_glu,
    "gated_mlp": gated_mlp,
    "conv2d_relu": conv2d_relu,
    "_linear_backward": linear_backward,
    "_linear_backward_across": linear_backward_across,
    "_weight_gradient": weight_gradient,
    "_accumulated_weight_gradient": weight_gradient,
    "_linear_glu_aux": linear_glu,
    "_glu_backward": glu_backward,
    "float8_linear": linear,
    "float8_mlp": mlp,
    "float8_gated_mlp": gated_mlp,
    "_float8_product": float8_product,
}


def register() -> None:
    """Registers the operators' formulas with PyTorch's FLOP counter. The import of the package
    does it.

    Examples::

        >>> flops.register()
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> with FlopCounterMode(display=False) as counter:
        ...     y = FusedLinear(8, 16)(torch.randn(4, 8))
        >>> counter.get_total_flops()
        1024
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for name, formula in FORMULAS.items():
        op = getattr(torch.ops.fused, name)
        if op not in flop_registry:
            register_flop_formula(op)(formula)


def register_when_imported() -> None:
    """Registers when torch's counter is imported, which takes a third of a second."""
    when_imported("torch.utils.flop_counter", register)
