"""What is to be fused in a model: all of it is judged before anything is changed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from . import families, fit
from .call import activation_kind, learn
from .chains import (
    Chain,
    Element,
    Layer,
    blocks,
    drops,
    has_parameters,
    is_activation,
    is_changeable,
    is_sequential,
    pass_over,
)
from .classes import (
    SEQUENTIAL,
    Config,
    Function,
    change_class,
    class_objection,
    is_made_here,
    module_objection,
    origin,
    subclass,
)
from .families import full_name
from .gated_plan import FILTERED, GatedPlan
from .model import FUSED, Model
from .reading import Text, place_of
from .report import Report, Skipped
from .resolve import Value
from .rewrite import Mark, can_change

Filter = Callable[[str, nn.Module], bool]

NORMALISED = (
    "a batch normalisation stands between it and its ReLU; fold it into the convolution first, "
    "where it is not trained (torch.nn.utils.fuse_conv_bn_eval)"
)
SEEN = "what it returns is read elsewhere too, or something runs before its activation does"


@dataclass
class Change:
    """What is to change in one module."""

    marks: dict = field(default_factory=dict)  # by (class, function name, digest): of marks by at
    refused: set[str] = field(default_factory=set)
    low: set[str] = field(default_factory=set)
    follows: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module) -> Change:
        """As the module is now."""
        config = vars(type(module)).get("__fused__", Config())
        marks = {
            (f.cls, f.name, f.digest): {(m.run, m.first, m.last): m for m in f.marks}
            for f in config.functions
        }
        return cls(marks, set(config.refused), set(config.low), set(config.follows))

    def config(self) -> Config:
        functions = tuple(
            Function(*key, tuple(m._replace(script=None) for _, m in sorted(marks.items())))
            for key, marks in sorted(self.marks.items())
        )
        sets = (tuple(sorted(s)) for s in (self.refused, self.low, self.follows))
        return Config(functions, *sets)


class Plan(GatedPlan):
    """Finds what can be fused.

    Attributes:
        layers: to change, by place.
        skipped: reason and place, by path.
    """

    def __init__(self, root: nn.Module, filter_fn: Filter | None) -> None:
        self.filter_fn = filter_fn
        self.model = Model(root)
        self.paths = self.model.paths
        self.layers: dict[tuple, Layer] = {}
        self.skipped = {path: (reason, "") for path, reason in self.model.frozen.items()}
        self.changes = {module: Change.of(module) for module in self.paths}
        self._asked: dict[str, bool] = {}
        self._results: dict[tuple[nn.Module, Text], set[str]] = {}
        self._gated: set[tuple] = set()  # places of calls in gated layers
        self._seen: set[int] = set()  # activations that follow a layer somewhere
        self._reasons: dict[type, str | None] = {}
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
        element, activation = layer.linear, layer.activation
        change = self.changes[element.owner]
        common = self._place_objection(layer, steps)
        fitting, refused = [], set()
        for value in layer.layers:
            reason, name = self._objection(value, common), self._relative(element, value)
            if reason is FILTERED:
                refused.add(name)
            elif reason is None and self._is_fused(element, steps[-1], name):
                reason = "already fused"
            if reason is None:
                change.refused.discard(name)
                fitting.append(value)
            else:
                self.skipped[value.path] = reason, element.where
        if fitting or element.text is None:
            change.refused |= refused
        if fitting:
            layer.kind = next(filter(None, activation.kinds()), "relu")
            given = activation.step.options().values() if activation.step else ()
            if any(isinstance(value, ast.AST) for value in given):
                layer.kind = layer.kind.partition("_")[0]
            for value in activation.values:
                learn(value.value)
            layer.layers = fitting
            if element.text is not None:
                self._mark(element, steps[-1].at[1])
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
        if linear.text is not None and not all(can_change(linear.text, e.step) for e in steps):
            return "the call is written in a way that cannot be changed"
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
        cls = origin(type(owner))
        if cls not in self._reasons:
            self._reasons[cls] = class_objection(cls)
        return self._reasons[cls] or module_objection(owner)

    def _is_fused(self, element: Element, last: Element, name: str) -> bool:
        before = Change.of(element.owner)
        if element.text is None:
            is_there = is_made_here(type(element.owner))
        else:
            is_there = (*element.at, last.at[1]) in before.marks.get(self._key(element), {})
        return is_there and name not in before.refused

    def _relative(self, element: Element, value: Value) -> str:
        start = self.paths[element.owner]
        return value.path[len(start) + 1 :] if start else value.path

    def _key(self, element: Element) -> tuple[str, str, str]:
        function = element.text.function
        return full_name(element.cls), function.__name__, element.text.digest

    def _mark(self, element: Element, last: int) -> None:
        marks = self.changes[element.owner].marks.setdefault(self._key(element), {})
        at = (*element.at, last)
        marks.setdefault(at, Mark(*at))

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
            if (
                any(isinstance(v.value, nn.Conv2d) for v in layer.values)
                and any(isinstance(v.value, nn.modules.batchnorm._BatchNorm) for v in norm.values)
                and is_activation(activation)
                and "relu" in activation.kinds()
            ):
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
        path = families.next_linear_of(self.paths[element.owner], origin(type(element.owner)))
        if path not in self.model.modules:
            return None
        owner = self.model.modules[path.rpartition(".")[0]]
        name = path.rpartition(".")[2]
        for base, _, function in self.model.functions_of(owner):
            if name in function.__code__.co_names:
                for chain in self.model.read(owner, base, function):
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
            if not fitting or (element.text and not is_changeable(element)):
                return None
            change = self.changes[element.owner]
            if element.text is None:
                change.follows.add(element.at)
            elif all(at[:2] != element.at for at in change.marks.get(self._key(element), ())):
                self._mark(element, element.at[1])
            self.layers[element.place] = Layer(element, fitting)
        return self.layers[element.place]

    def _follow_names(self, chain: Chain) -> None:
        """Layers that take a name to which the result of a fused call was given, in loops say."""
        for element in chain:
            if element.text is None or element.place in {*self.layers, *self._gated}:
                continue
            name = getattr(element.step.data, "id", None)
            if name is None or not is_changeable(element):
                continue
            key = element.owner, element.text
            if key not in self._results:
                self._results[key] = self._results_in(*key)
            if name in self._results[key]:
                layers = element.of(fit.is_linear)
                if not all(map(self._objection, layers)):
                    self._mark(element, element.at[1])

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
                if isinstance(child, nn.Module) and activation_kind(child)
                and id(child) not in self._seen
            ]  # fmt: skip
            if is_sequential(module) or isinstance(module, FUSED):
                continue  # no linear layer before that activation; fused already
            if module in self.model.unread:
                self.skipped[path] = self.model.unread[module]
            elif names and module not in owners and has_layer_for(module, names):
                forward = getattr(type(module).forward, "__code__", None)
                reason = (
                    f"the code of {type(module).__name__} does not show a layer's output going "
                    f"straight to {names[0]!r} and nowhere else"
                )
                self.skipped[path] = reason, place_of(forward) if forward else ""

    # --- carrying it out ------------------------------------------------------------------------

    def apply(self, memory: str, dry_run: bool) -> Report:
        """Changes the model. Nothing here can fail half way."""
        for layer in self.layers.values():
            if memory == "low" and layer.memory_pays:
                self._keep_less(layer)
        owners = {layer.linear.owner for layer in self.layers.values()}
        owners |= {m for m, c in self.changes.items() if c.marks}
        classes = {owner: self._class_for(owner) for owner in owners}
        found = list(blocks(list(self.layers.values()), classes, self.paths))
        if not dry_run:
            for owner, cls in classes.items():
                change_class(owner, cls)
        skipped = [Skipped(path, *reason) for path, reason in self.skipped.items()]
        return Report(found, skipped)

    def _keep_less(self, layer: Layer) -> None:
        element, change = layer.linear, self.changes[layer.linear.owner]
        if element.text is None:
            change.low.add(element.at)
        else:
            marks = change.marks[self._key(element)]
            at = (*element.at, layer.last.at[1])
            marks[at] = marks[at]._replace(low=True)

    def _class_for(self, owner: nn.Module) -> type:
        change, cls = self.changes[owner], origin(type(owner))
        if any(base is SEQUENTIAL[0] for base in cls.__mro__):
            change.marks.setdefault((full_name(nn.Sequential), "forward", ""), {})
        return subclass(cls, change.config())


def has_layer_for(module: nn.Module, activations: list[str]) -> bool:
    """Whether a child of `module` may be meant to apply one of its activations.

    Beside a batch normalisation a convolution seldom is, and those that are have their reason.
    """
    children = module._modules
    if any(map(fit.is_linear, children.values())):
        return True
    kinds = [activation_kind(children[name]) for name in activations]
    norms = (isinstance(m, nn.modules.batchnorm._BatchNorm) for m in children.values())
    convolutions = (isinstance(m, nn.Conv2d) for m in children.values())
    return "relu" in kinds and not any(norms) and any(convolutions)
