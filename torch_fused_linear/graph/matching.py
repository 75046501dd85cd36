"""Recognises linear layers and activations in a graph of torch calls, before autograd.

Such a graph is not functional: what a node reads may be written in place between two nodes, modes
(autocast, grad mode) change on the way, and one thing is spelled in many ways. Matches say which
nodes they consist of; whether they may be moved is for the pass to decide.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .._support import torch_internals
from .._support.torch_internals import FakeTensor
from ..activations import OPERATORS as OWN
from ..activations import name_of_gelu, of_operator
from .spellings import arguments, kind

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Linear:
    """A product with a weight and perhaps a bias; the last of the nodes is the result."""

    nodes: list[Node]
    input: Node
    weight: Node
    bias: Node | None
    transposed: bool = False  # the weight is [in, out]


@dataclass
class Activation:
    """One of our activations of one node; the last of the nodes is the result."""

    nodes: list[Node]
    name: str


_PRODUCTS = ("linear", *OWN, "addmm", "matmul")
# Methods after which a node's fake tensor is no longer what it was.
_TURNS = {"t_", "transpose_", "swapdims_", "swapaxes_", "squeeze_", "unsqueeze_", "set_"}
_TURNS |= {"resize_", "resize_as_", "as_strided_"}


def value(node: Node) -> FakeTensor | None:
    """The fake tensor that the node stands for: no other kind of tensor will do."""
    if any(user.target in _TURNS for user in node.users):
        return None
    found = node.meta.get("example_value", node.meta.get("val"))
    return found if isinstance(found, FakeTensor) else None


def same(a, b) -> bool:
    """Returns whether two sizes, or lists of them, are equal without a guard that says so."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return statically_known_true(a == b)


# --- linear layers -------------------------------------------------------------------------------


def find_linear(node: Node) -> Linear | None:
    """The layer whose result the node is, if our operators can stand in its place."""
    linear = _product(node) or _biased_product(node)
    return linear if linear and _is_supported(linear) else None


def _product(node: Node) -> Linear | None:
    what = kind(node)
    args = arguments(node) if what in _PRODUCTS else None
    if args is None:
        return None
    if what == "addmm":
        if args.get("beta", 1) != 1 or args.get("alpha", 1) != 1 or "mat2" not in args:
            return None
        return Linear([node], args["mat1"], args["mat2"], args["input"], transposed=True)
    if what == "matmul":
        return Linear([node], args["input"], args["other"], None, transposed=True)
    return Linear([node], args["input"], args["weight"], args.get("bias"))


def untransposed(node: Node) -> Node | None:
    """Returns the node that this one is the transposed matrix of, or None."""
    what, args = kind(node), node.args
    swaps = {
        "t": lambda: len(args) == 1,
        "getattr": lambda: args[1] in ("T", "mT"),
        "transpose": lambda: set(args[1:]) in ({0, 1}, {0, -1}, {-2, 1}, {-2, -1}),
        "permute": lambda: list(args[1] if len(args) == 2 else args[1:]) in ([1, 0], [-1, -2]),
    }
    is_plain = what in swaps and not node.kwargs and isinstance(args[0], Node)
    fake = value(args[0]) if is_plain else None
    return args[0] if fake is not None and fake.dim() == 2 and swaps[what]() else None


def _biased_product(node: Node) -> Linear | None:
    """A product without bias, and the sum with a vector."""
    args = arguments(node) if kind(node) in ("add", "add_") else None
    operands = [args["input"], args.get("other")] if args else [None]
    if not all(isinstance(operand, Node) for operand in operands):
        return None
    # In place it is the product that must be written to.
    for product, bias in [operands] if kind(node) == "add_" else [operands, operands[::-1]]:
        linear = _product(product)
        is_bare = linear and linear.bias is None and kind(product) in ("linear", "matmul")
        # Under autocast the product may be narrower than the sum, which is then no layer's.
        same_type = dtype_of(product) == dtype_of(bias) == dtype_of(node)
        if is_bare and same_type and product is not bias and only_user(product):
            return Linear([product, node], linear.input, linear.weight, bias, linear.transposed)
    return None


def dtype_of(node: Node) -> torch.dtype | None:
    fake = value(node)
    return None if fake is None else fake.dtype


def has_kernel(fakes: list[FakeTensor]) -> bool:
    """Returns whether the operators take these dtypes and layouts, on one device."""
    device = fakes[0].device
    if any(f.dtype not in DTYPES or f.layout != torch.strided or f.device != device for f in fakes):
        return False
    key = device.type.upper()
    return key in ("CPU", "CUDA") and torch_internals.has_kernel("fused::linear", key)


def _is_supported(linear: Linear) -> bool:
    nodes = [linear.input, linear.weight, *([] if linear.bias is None else [linear.bias])]
    if not all(isinstance(node, Node) for node in nodes):
        return False
    fakes = [value(node) for node in [*nodes, linear.nodes[-1]]]
    if any(fake is None for fake in fakes) or not has_kernel(fakes):
        return False
    input, weight, result = fakes[0], fakes[1], fakes[-1]
    if input.dim() < 1 or weight.dim() != 2:
        return False
    features = weight.shape[1 if linear.transposed else 0]
    if any(f.dtype != weight.dtype or not same(list(f.shape), [features]) for f in fakes[2:-1]):
        return False
    return same(list(result.shape), [*input.shape[:-1], features])


# --- activations ---------------------------------------------------------------------------------


def find_activation(node: Node) -> Activation | None:
    """The activation that is the only thing done with the node's result."""
    dtype = dtype_of(node)
    for activation in filter(None, (_square(node), _call(node), _tanh_formula(node))):
        others = {dtype_of(n) for n in activation.nodes} - {dtype}
        # Under autocast, on a GPU, a power is of fp32, and so is what is made of it.
        if not others or (others == {torch.float32} and _is_narrowed(activation, dtype)):
            return activation
    return None


def _is_narrowed(activation: Activation, dtype: torch.dtype) -> bool:
    """Returns whether only products use the result, and in this dtype."""
    *_, (end, _) = walk(activation.nodes[-1])
    return all(kind(n) in _PRODUCTS and dtype_of(n) == dtype for n in end.users)


def own_activation(node: Node) -> str | None:
    """The activation inside of one of our own layers."""
    if kind(node) not in OWN:
        return None
    # The operator's default is the tanh form, where torch's is the exact one.
    activation = of_operator(kind(node), arguments(node).get("approximate", "tanh"))
    return activation and activation.name


def _call(node: Node) -> Activation | None:
    user = only_user(node)
    args = arguments(user) if user and kind(user) in ("relu", "gelu", "silu") else None
    if args is None or args["input"] is not node:
        return None
    if kind(user) != "gelu":
        return Activation([user], kind(user))
    name = name_of_gelu(args.get("approximate", "none"))
    return name and Activation([user], name)


def _square(node: Node) -> Activation | None:
    """ReLU, and its square."""
    relu = _call(node)
    square = relu and relu.name == "relu" and only_user(relu.nodes[0])
    if not square or kind(square) not in ("square", "pow", "mul"):
        return None
    x = relu.nodes[0]
    squares = {"input": x}, {"input": x, "exponent": 2}, {"input": x, "other": x}
    return Activation([x, square], "relu2") if arguments(square) in squares else None


def _tanh_formula(x: Node) -> Activation | None:
    """0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), as written out in many a model."""
    if len(x.users) != 3:
        return None
    for half in x.users:
        tail = only_user(half) if _other(half, "mul", 0.5) is x else None
        bracket = tail and _other(tail, "mul", half)
        tanh = bracket and _other(bracket, "add", 1.0)
        args = arguments(tanh) if tanh and kind(tanh) == "tanh" else None
        scaled = args and args["input"]
        inner = _other(scaled, "mul", math.sqrt(2 / math.pi))
        cubic = inner and _other(inner, "add", x)
        power = cubic and _other(cubic, "mul", 0.044715)
        if not power or kind(power) != "pow" or (*power.args, *power.kwargs) != (x, 3.0):
            continue
        nodes = [half, power, cubic, inner, scaled, tanh, bracket]
        if set(x.users) == {half, power, inner} and all(map(only_user, nodes[1:])):
            return Activation([*nodes, tail], "gelu_tanh")
    return None


def _other(node, what: str, operand) -> Node | None:
    """The node that is added to or multiplied by the operand."""
    if not isinstance(node, Node) or kind(node) != what or node.kwargs or len(node.args) != 2:
        return None
    for a, b in (node.args, node.args[::-1]):
        equal = a is operand if isinstance(operand, Node) else type(a) is float and a == operand
        if equal and isinstance(b, Node):
            return b
    return None


# --- between two layers --------------------------------------------------------------------------


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def walk(node: Node) -> Iterator[tuple[Node, list[Node]]]:
    """The node, and each after it that holds the same elements in the same order and is all that
    is done with the one before, with the way there. Dropout that does nothing is gone through."""
    path: list[Node] = []
    while True:
        yield node, list(path)
        user = only_user(node)
        if user is None or user.args[:1] != (node,) or not _keeps(user):
            return
        if value(user) is None or dtype_of(user) != dtype_of(node):
            return
        path.append(user)
        node = user


def _keeps(node: Node) -> bool:
    if kind(node) != "dropout":
        return kind(node) == "view"
    args = arguments(node)
    return args is not None and (args.get("training", True) is False or args.get("p", 0.5) == 0)
