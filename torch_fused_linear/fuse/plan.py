"""What is to be fused in a model: all of it is judged before anything is changed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType

from torch import nn

from . import families, fit
from .chains import (
    Chain,
    Element,
    Layer,
    blocks,
    drops,
    has_parameters,
    is_activation,
    is_sequential,
    pass_over,
)
from .gated_plan import FILTERED, GatedPlan
from .model import FUSED, Model, functions_of
from .plain import MARK
from .reading import Text, code_of, place_of
from .report import Report, Skipped
from .resolve import Value
from .rewrite import Chosen, chosen_in, is_sequence_rewritten, rewrite

Filter = Callable[[str, nn.Module], bool]

NORMALISED = "a normalisation stands between it and its activation"
FOLD = (
    "; fold it into the layer first, where it is not trained (torch.nn.utils.fuse_conv_bn_eval, "
    "fuse_linear_bn_eval)"
)
SEEN = "what it returns is read elsewhere too, or something runs before its activation does"


class Plan(GatedPlan):
    """Finds what can be fused.

    Attributes:
        layers: to mark, by place.
        chosen: the calls to rewrite.
        skipped: reason and place, by path.
    """

    def __init__(self, root: nn.Module, filter_fn: Filter | None) -> None:
        self.filter_fn = filter_fn
        self.model = Model(root)
        self.paths = self.model.paths
        self.layers: dict[tuple, Layer] = {}
        self.skipped = {path: (reason, "") for path, reason in self.model.frozen.items()}
        self.chosen: dict[Text, Chosen] = {}
        self.following: list[Value] = []  # that take the result of a fused call, in loops say
        self._asked: dict[str, bool] = {}
        self._results: dict[tuple[nn.Module, Text], set[str]] = {}
        self._gated: set[tuple] = set()  # places of calls in gated layers
        self._seen: set[int] = set()  # activations that follow a layer somewhere
        bases = {base.__name__ for module in self.paths for base in type(module).__mro__}
        self.is_sharded = "FSDPModule" in bases  # whose layers have plain weights when they run
        chains = [chain for module in self.paths for chain in self.model.chains(module)]
        for step in (self._find_gated, self._find_layers, self._link, self._follow_names):
            for chain in chains:
                step(chain)
        self._explain_the_rest()

    # --- layers and their activations -----------------------------------------------------------

    def _find_layers(self, chain: Chain) -> None:
        self._find_normalised(chain)
        for i, element in enumerate(chain):
            layers = element.of(fit.is_layer)
            if not layers or element.place in self._gated:
                continue
            k = pass_over(chain, i + 1)
            if k == len(chain) or not is_activation(chain[k]):
                continue
            self._seen |= {id(v.value) for v in chain[k].values}
            steps = [e.step for e in chain[i + 1 : k + 1] if e.step is not None]
            if not all(step.is_sole for step in steps):
                for value in layers:
                    self.skipped.setdefault(value.path, (SEEN, element.where))
                continue
            layer = Layer(element, layers, activation=chain[k])
            layer.drops_before = drops(chain[i + 1 : k])
            if self._accept(layer, chain[i : k + 1]):
                self.layers[element.place] = layer

    def _accept(self, layer: Layer, steps: Chain) -> bool:
        """Whether at least one of the layers that may stand there can be fused; why others not."""
        element, activation, fitting = layer.linear, layer.activation, []
        common = self._place_objection(layer, steps)
        for value in layer.layers:
            reason = self._objection(value, common)
            if reason is None and self._is_fused(element, steps, value):
                reason = "already fused"
            if reason is None:
                fitting.append(value)
            else:
                self.skipped[value.path] = reason, element.where
        if fitting:
            layer.kind = next(filter(None, activation.kinds()), "relu")
            given = activation.step.options().values() if activation.step else ()
            if any(isinstance(value, ast.AST) for value in given):
                layer.kind = layer.kind.partition("_")[0]
            layer.layers = fitting
            self._choose(steps)
        return bool(fitting)

    def _place_objection(self, layer: Layer, steps: Chain) -> str | None:
        """What stands in the way for whatever layer it is."""
        linear, activation = layer.linear, layer.activation
        if reason := self._owner_objection(linear.owner):
            return reason
        if activation.owner is not linear.owner:
            return "its activation lies in another container"
        if linear.step is not None and not linear.step.is_bare:
            return "it is given more than a tensor"
        if activation.step is not None and activation.step.callee is None:  # h.relu()
            return None
        options, found = activation.options(), activation.of(fit.is_activation)
        kinds = {fit.plain_kind(v.value, options) for v in found}
        if layer.is_convolution and "relu" not in kinds:
            return f"{type(found[0].value).__name__}: a convolution can be fused with ReLU only"
        if kinds == {None}:
            return fit.activation_objection(found[0].value, options)
        if layer.drops_before and "relu" not in kinds:
            return "a dropout that acts in training stands before the activation"
        return None

    def _owner_objection(self, owner: nn.Module) -> str | None:
        is_own = "forward" in vars(owner)
        name = type(owner).__name__
        return f"{name} has a forward of its own, set on the object" if is_own else None

    def _is_fused(self, element: Element, steps: Chain, value: Value) -> bool:
        if MARK not in vars(value.value):
            return False
        if element.text is None:
            return MARK in vars(element.owner) and is_sequence_rewritten()
        chosen = Chosen()
        chosen.add(element.text, [e.step for e in steps])
        return chosen_in(element.text.function).has(chosen)

    def _choose(self, steps: Chain) -> None:
        """The steps are to be one call, or one step a call that may take a fused one's result."""
        if (text := steps[0].text) is not None:
            self.chosen.setdefault(text, Chosen()).add(text, [e.step for e in steps])

    def _objection(self, value: Value, common: str | None = None) -> str | None:
        reason = fit.linear_objection(value.value, self.is_sharded) or common
        return reason or (None if self._wants(value) else FILTERED)

    def _wants(self, value: Value) -> bool:
        if self.filter_fn is None:
            return True
        if value.path not in self._asked:
            self._asked[value.path] = bool(self.filter_fn(value.path, value.value))
        return self._asked[value.path]

    def _find_normalised(self, chain: Chain) -> None:
        for layer, norm, activation in zip(chain, chain[1:], chain[2:]):
            found = [type(v.value) for v in norm.values if isinstance(v.value, nn.Module)]
            if layer.of(fit.is_layer) and is_activation(activation) and any(activation.kinds()):
                if any(issubclass(cls, nn.modules.batchnorm._BatchNorm) for cls in found):
                    self.skipped[layer.values[0].path] = NORMALISED + FOLD, layer.where
                elif any(cls.__name__.endswith("Norm") for cls in found):
                    self.skipped[layer.values[0].path] = NORMALISED, layer.where

    # --- the layers that follow -----------------------------------------------------------------

    def _link(self, chain: Chain) -> None:
        for i, element in enumerate(chain):
            layer = self.layers.get(element.place)
            if layer is None or layer.activation is None or element is not layer.linear:
                continue
            if layer.is_convolution:
                continue  # it hands no gradient over
            after = next(k for k in range(i, len(chain)) if chain[k] is layer.activation) + 1
            end = pass_over(chain, after)
            layer.drops_after = drops(chain[after:end])
            if end < len(chain):
                layer.next = self._follower(chain[end])
                layer.meets_parameters = any(has_parameters(v.value) for v in chain[end].values)
            elif following := self._following_in_family(element):
                layer.next = self._follower(following)

    def _following_in_family(self, element: Element) -> Element | None:
        path = families.next_linear_of(self.paths[element.owner], type(element.owner))
        if path not in self.model.modules:
            return None
        owner = self.model.modules[path.rpartition(".")[0]]
        name = path.rpartition(".")[2]
        for function in functions_of(type(owner)):
            if name in code_of(function).co_names:
                for chain in self.model.read(owner, function):
                    for found in chain:
                        if [v.path for v in found.values] == [path]:
                            return found
        return None

    def _follower(self, element: Element) -> Layer | None:
        """The layer of `element`, which is to take over the gradient of the one before."""
        layers = element.of(fit.is_linear)
        if not layers or self._owner_objection(element.owner):
            return None
        if element.place not in self.layers:
            fitting = []
            for value in layers:
                if reason := self._objection(value):
                    self.skipped.setdefault(value.path, (reason, element.where))
                else:
                    fitting.append(value)
            if not fitting or (element.text and not element.step.is_bare):
                return None
            self._choose([element])
            self.layers[element.place] = Layer(element, fitting)
        return self.layers[element.place]

    def _follow_names(self, chain: Chain) -> None:
        """Layers that take a name to which the result of a fused call was given, in loops say."""
        for element in chain:
            if element.text is None or element.place in {*self.layers, *self._gated}:
                continue
            name = getattr(element.step.data, "id", None)
            if name is None or not element.step.is_bare:
                continue
            key = element.owner, element.text
            if key not in self._results:
                self._results[key] = self._results_in(*key)
            layers = element.of(fit.is_linear) if name in self._results[key] else []
            if layers := [v for v in layers if not self._objection(v)]:
                self._choose([element])
                self.following += layers

    def _results_in(self, owner: nn.Module, text: Text) -> set[str]:
        """The names to which a function gives the results of fused calls."""
        calls = [
            layer.activation.step.node
            for layer in self.layers.values()
            if layer.activation and layer.linear.owner is owner and layer.linear.text
        ]
        return {
            getattr(target, "id", "")
            for node in (ast.walk(text.node) if calls else ())
            if isinstance(node, ast.Assign) and any(n in calls for n in ast.walk(node.value))
            for target in node.targets
        }

    # --- the rest -------------------------------------------------------------------------------

    def _explain_the_rest(self) -> None:
        """Says why modules that look like a block, with activations of ours, are none."""
        owners = {layer.linear.owner for layer in self.layers.values()}
        for module, path in self.paths.items():
            names = [
                name
                for name, child in module._modules.items()
                if isinstance(child, nn.Module) and fit.activation_kind(child)
                and id(child) not in self._seen
            ]  # fmt: skip
            if is_sequential(module) or isinstance(module, FUSED):
                continue  # no linear layer before that activation; fused already
            if module in self.model.unread:
                self.skipped[path] = self.model.unread[module]
            elif names and module not in owners and has_layer_for(module, names):
                forward = getattr(type(module), "forward", None)
                reason = (
                    f"the code of {type(module).__name__} does not show a layer's output going "
                    f"straight to {names[0]!r} and nowhere else"
                )
                is_python = isinstance(forward, FunctionType)
                self.skipped[path] = reason, place_of(code_of(forward)) if is_python else ""

    # --- carrying it out ------------------------------------------------------------------------

    def apply(self, memory: str, dry_run: bool) -> Report:
        """Changes the model. Nothing here can fail half way."""
        found = list(blocks(list(self.layers.values()), self.paths))
        skipped = [Skipped(path, *reason) for path, reason in self.skipped.items()]
        if dry_run:
            return Report(found, skipped)
        sequences = [e.linear.owner for e in self.layers.values() if e.linear.text is None]
        rewrite(self.chosen, bool(sequences))
        of_layers = [v.value for layer in self.layers.values() for v in layer.layers]
        for module in (*sequences, *of_layers, *(v.value for v in self.following)):
            vars(module).setdefault(MARK, "default")
        if memory == "low":
            for layer in self.layers.values():
                for value in layer.layers if layer.memory_pays else ():
                    vars(value.value)[MARK] = memory
        return Report(found, skipped)


def has_layer_for(module: nn.Module, activations: list[str]) -> bool:
    """Whether a child of `module` may be meant to apply one of its activations.

    Beside a batch normalisation a convolution seldom is, and those that are have their reason.
    """
    children = module._modules
    if any(map(fit.is_linear, children.values())):
        return True
    kinds = [fit.activation_kind(children[name]) for name in activations]
    norms = (isinstance(m, nn.modules.batchnorm._BatchNorm) for m in children.values())
    convolutions = (isinstance(m, nn.Conv2d) for m in children.values())
    return "relu" in kinds and not any(norms) and any(convolutions)
