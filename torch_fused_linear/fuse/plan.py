"""What is to be fused in a model: all of it is judged before anything is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..nn.mlp import FusedMLP
from . import families, safety
from .chains import Chain, Dropout, Element, Function, Model, is_sequential
from .report import Block, Report, Skipped
from .swap import FusedActivation, is_swapped, swap_activation, swap_linear

Filter = Callable[[str, nn.Module], bool]

OPERATORS = {  # of each activation: the operator before, and the fused one
    "none": (None, "linear"),
    "relu": ("ReLU", "linear_relu"),
    "gelu_tanh": ("GELU (tanh)", "linear_gelu (tanh)"),
    "gelu_erf": ("GELU (erf)", "linear_gelu (erf)"),
}

NORMALISED = (
    "a batch normalisation stands between it and its ReLU; fold it into the convolution first, "
    "where it is not trained (torch.nn.utils.fuse_conv_bn_eval)"
)


@dataclass
class Layer:
    """A linear layer or convolution that is to change, with the activation it is to apply."""

    linear: Element
    kind: str = "none"
    activation: Element | None = None
    drops_before: bool = False  # a dropout between linear layer and activation
    drops_after: bool = False
    next: Layer | None = None
    meets_parameters: bool = False  # straight after the activation comes another module with some

    @property
    def memory_pays(self) -> bool:
        """Whether less is kept with low memory. GELU's output can be computed anew by the layer
        after it; ReLU's is kept by that layer, or by a normalisation or whatever else with
        parameters comes there, and bits of it beside that would be more."""
        dropped = self.drops_before or self.drops_after
        meets_next = self.next is not None and not dropped
        if self.kind.startswith("gelu"):
            return meets_next
        return not meets_next and (dropped or not self.meets_parameters)


class Plan:
    """Finds what can be fused.

    Attributes:
        layers: to change, by place.
        skipped: the reason, by path.
        refused: paths that `filter_fn` would not have.
        accepted: whether `filter_fn` would have something that is fused already.
    """

    def __init__(self, root: nn.Module, filter_fn: Filter | None) -> None:
        self.model = Model(root)
        self.filter_fn = filter_fn
        self.layers: dict[tuple[int, str], Layer] = {}
        self.skipped: dict[str, str] = dict(self.model.frozen)
        self.refused: list[str] = []
        self.accepted = False
        chains = list(self.model.chains())
        self._find_layers(chains)
        for chain in chains:
            self._link(chain)
        self._explain_the_rest()

    # --- linear layers and their activations ----------------------------------------------------

    def _find_layers(self, chains: list[Chain]) -> None:
        by_activation: dict[tuple[int, str], list[Layer]] = defaultdict(list)
        for chain in chains:
            for layer in pairs(chain):
                by_activation[layer.activation.place].append(layer)
            self.skipped |= dict.fromkeys(normalised(chain), NORMALISED)
        self._seen = set(by_activation)
        for group in by_activation.values():
            reasons = {layer.linear.path: self._objection(layer, len(group)) for layer in group}
            if any(reasons.values()):
                # an activation that is called after several layers goes from all or from none
                other = f"shares its activation with {next(p for p, r in reasons.items() if r)}"
                self.skipped |= {path: reason or other for path, reason in reasons.items()}
            else:
                self.layers |= {layer.linear.place: layer for layer in group}

    def _objection(self, layer: Layer, places: int) -> str | None:
        linear, activation = layer.linear, layer.activation
        owner = linear.owner
        if isinstance(activation.value, FusedActivation) and is_swapped(linear.value):
            self.accepted |= self._wants(linear)
            return "already fused"
        return (
            safety.linear_objection(linear.value, self.model.is_shared)
            or convolution_objection(layer)
            or self._activation_objection(activation, owner)
            or (layer.drops_before and dropout_objection(layer))
            or self._code_objection(linear, activation, places)
            or (None if self._wants(linear, is_asked=True) else "filter_fn says no")
        )

    def _activation_objection(self, activation: Element, owner: nn.Module) -> str | None:
        if isinstance(activation.value, Function):
            return (
                f"{activation.name} is called as a function in the code of {type(owner).__name__}; "
                "an activation module could be fused"
            )
        if activation.owner is not owner:
            return "its activation lies in another container"
        forgets = families.full_name(type(owner)) == families.FORGETS_ACTIVATION_MODULES
        if forgets and isinstance(activation.value, nn.Module):
            return f"a copy of {type(owner).__name__} forgets activation modules; pass a function"
        return safety.activation_objection(activation.value)

    def _code_objection(self, linear: Element, activation: Element, places: int) -> str | None:
        owner, code = linear.owner, self.model.code
        if not is_sequential(owner):
            if reason := safety.hooks_objection(owner, kinds=()):
                return f"{type(owner).__name__} {reason}"
            cls = type(owner)
            return code.misuse(cls, linear.name, 1) or code.misuse(cls, activation.name, places)
        for parent, name in self.model.places[owner]:
            if code.takes_apart(type(parent), name):
                return f"{type(parent).__name__} does more with {name!r} than call it"
        return None

    def _wants(self, linear: Element, is_asked: bool = False) -> bool:
        if self.filter_fn is None or self.filter_fn(linear.path, linear.value):
            return True
        if is_asked:
            self.refused.append(linear.path)
        return False

    # --- the layers that follow -----------------------------------------------------------------

    def _link(self, chain: Chain) -> None:
        for i, element in enumerate(chain):
            layer = self.layers.get(element.place)
            if layer is None or layer.activation is None or element is not layer.linear:
                continue
            if safety.is_convolution(element.value):
                continue  # it hands no gradient over
            after = next(k for k in range(i, len(chain)) if chain[k] is layer.activation) + 1
            end = pass_over(chain, after)
            layer.drops_after = drops(chain[after:end])
            if end < len(chain):
                layer.next = self._follower(chain[end])
                layer.meets_parameters = has_parameters(chain[end].value)
            elif following := self._following_in_family(element):
                layer.next = self._follower(following)

    def _following_in_family(self, element: Element) -> Element | None:
        owner = element.owner
        path = families.next_linear_of(self.model.paths[owner], type(owner))
        module = self.model.modules.get(path)
        if module is None:
            return None
        return Element(path, *self.model.places[module][0], module)

    def _follower(self, element: Element) -> Layer | None:
        """The layer of `element`, which is to take over the gradient of the one before."""
        if not safety.is_linear(element.value):
            return None
        if element.place not in self.layers:
            reason = safety.linear_objection(element.value, self.model.is_shared)
            if reason or not self._wants(element):
                self.skipped.setdefault(element.path, reason or "filter_fn says no")
                return None
            self.layers[element.place] = Layer(element)
        return self.layers[element.place]

    # --- the rest -------------------------------------------------------------------------------

    def _explain_the_rest(self) -> None:
        """Says why modules that look like a block, with activations of ours, are none."""
        for module, path in self.model.paths.items():
            names = [
                name
                for name, child in module._modules.items()
                if safety.activation_kind(child) and (id(module), name) not in self._seen
            ]
            if not names or not has_layer_for(module, names):
                continue
            cls = type(module).__name__
            if is_sequential(module) or isinstance(module, FusedMLP):
                continue  # no linear layer before that activation; fused already
            if not self.model.code.is_readable(type(module)):
                self.skipped[path] = f"the code of {cls}.forward cannot be read"
            else:
                self.skipped[path] = (
                    f"the code of {cls} does not show a layer's output going straight to "
                    f"{names[0]!r} and nowhere else"
                )

    # --- carrying it out ------------------------------------------------------------------------

    def apply(self, memory: str) -> Report:
        """Changes the model. Nothing here can fail half way."""
        blocks = list(self._blocks())
        linears = defaultdict(list)
        for layer in self.layers.values():
            swap_linear(layer.linear.value, layer.kind, memory if layer.memory_pays else "default")
            if layer.activation is not None:
                linears[layer.activation.place].append(layer)
        for group in linears.values():
            activation = group[0].activation
            names = tuple(layer.linear.name for layer in group)
            swap_activation(activation.owner, activation.name, names)
        return Report(blocks, [Skipped(path, reason) for path, reason in self.skipped.items()])

    def _blocks(self) -> Iterator[Block]:
        followers = {id(layer.next) for layer in self.layers.values()}
        for layer in self.layers.values():
            if id(layer) in followers:
                continue
            owner = layer.linear.owner
            chain, before, after = [], [], []
            while layer is not None and layer not in chain:
                chain.append(layer)
                operator, fused = OPERATORS[layer.kind]
                product = "MatMul"
                if safety.is_convolution(layer.linear.value):
                    product, fused = "Conv2d", "conv2d_relu"
                drops = ["Dropout"]
                before += [product] + ["BiasAdd"] * (layer.linear.value.bias is not None)
                before += drops * layer.drops_before + [operator] * (operator is not None)
                after += [fused] + drops * layer.drops_before
                before, after = (ops + drops * layer.drops_after for ops in (before, after))
                layer = layer.next
            paths = tuple(layer.linear.path for layer in chain)
            kind = type(owner).__name__
            yield Block(self.model.paths[owner], kind, paths, tuple(before), tuple(after))


def pairs(chain: Chain) -> Iterator[Layer]:
    """Every linear layer or convolution of a chain with the activation that follows it."""
    for i, element in enumerate(chain):
        if safety.is_layer(element.value):
            k = pass_over(chain, i + 1)
            is_sole = all(later.is_sole for later in chain[i + 1 : k + 1])
            if k < len(chain) and is_sole and is_activation(chain[k]):
                kind = safety.activation_kind(chain[k].value) or "none"
                yield Layer(element, kind, chain[k], drops_before=drops(chain[i + 1 : k]))


def has_layer_for(module: nn.Module, activations: Sequence[str]) -> bool:
    """Whether a child of `module` may be meant to apply one of its activations.

    Beside a batch normalisation a convolution seldom is, and those that are have their reason.
    """
    children = module._modules
    if any(map(safety.is_linear, children.values())):
        return True
    kinds = [safety.activation_kind(children[name]) for name in activations]
    norms = (isinstance(m, nn.modules.batchnorm._BatchNorm) for m in children.values())
    return "relu" in kinds and not any(norms) and any(map(safety.is_convolution, children.values()))


def normalised(chain: Chain) -> Iterator[str]:
    """The paths of convolutions between which and the ReLU stands a batch normalisation."""
    for layer, norm, activation in zip(chain, chain[1:], chain[2:]):
        if (
            safety.is_convolution(layer.value)
            and isinstance(norm.value, nn.modules.batchnorm._BatchNorm)
            and is_activation(activation)
            and safety.activation_kind(activation.value) == "relu"
        ):
            yield layer.path


def is_activation(element: Element) -> bool:
    return isinstance(element.value, Function) or safety.is_activation(element.value)


def pass_over(chain: Chain, start: int) -> int:
    """The index of the first element from `start` that is neither dropout nor identity."""
    while start < len(chain) and (
        isinstance(chain[start].value, Dropout)
        or (
            type(chain[start].value) in (nn.Dropout, nn.Identity)
            and not safety.hooks_objection(chain[start].value)
        )
    ):
        start += 1
    return start


def drops(elements: Chain) -> bool:
    """Whether there is a dropout that can act, in training."""
    return any(getattr(element.value, "p", 0) != 0 for element in elements)


def has_parameters(value: object) -> bool:
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def convolution_objection(layer: Layer) -> str | None:
    if not safety.is_convolution(layer.linear.value) or layer.kind == "relu":
        return None
    if isinstance(layer.activation.value, Function):
        return None  # which it is, is not known
    return f"{type(layer.activation.value).__name__}: a convolution can be fused with ReLU only"


def dropout_objection(layer: Layer) -> str | None:
    """ReLU and dropout may change places, for dropout only scales, or makes 0, what it is given.
    GELU may not; in eval mode neither, for the model may be trained later."""
    if layer.kind == "relu":
        return None
    return "a dropout that acts in training stands before the activation"
