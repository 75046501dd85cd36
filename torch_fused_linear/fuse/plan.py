"""What is to be fused in a model: all of it is judged before anything is changed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType

from torch import nn

from . import families, fit
from .model import FUSED, Chain, Element, Model, functions_of, is_sequential, pass_over
from .places import GatedPlace, Place, blocks, drops, has_parameters
from .plain import MARK
from .report import Report, Skipped
from .resolve import Value
from .rewrite import Groups, is_rewritten, is_sequence_rewritten, rewrite
from .source import Text, code_of, place_of

Filter = Callable[[str, nn.Module], bool]

NORMALISED = "a normalisation stands between it and its activation"
FOLD = (
    "; fold it into the layer first, where it is not trained (torch.nn.utils.fuse_conv_bn_eval, "
    "fuse_linear_bn_eval)"
)
SEEN = "what it returns is read elsewhere too, or something runs before its activation does"
BATCH_NORM = nn.modules.batchnorm._BatchNorm


class Plan:
    """Finds what can be fused.

    Attributes:
        places: of calls that are to be one, by the place of the first.
        chosen: the calls to rewrite.
        skipped: reason and place, by path.
        following: layers that take the result of a fused call, in loops say.
    """

    def __init__(self, root: nn.Module, filter_fn: Filter | None) -> None:
        self.filter_fn = filter_fn
        self.model = Model(root)
        self.paths = self.model.paths
        self.places: dict[tuple, Place] = {}
        self.skipped = {path: (reason, "") for path, reason in self.model.frozen.items()}
        self.chosen: dict[Text, Groups] = {}
        self.following: list[Value] = []
        self._asked: dict[str, bool] = {}
        self._results: dict[tuple[nn.Module, Text], set[str]] = {}
        self._gated: set[tuple] = set()  # places of calls in gated layers
        self._seen: set[int] = set()  # activations that follow a layer somewhere
        bases = {base.__name__ for module in self.paths for base in type(module).__mro__}
        self.is_sharded = "FSDPModule" in bases  # whose layers have plain weights when they run
        chains = [chain for module in self.paths for chain in self.model.chains(module)]
        for find in (self._find_gated, self._find_layers, self._link, self._follow_names):
            for chain in chains:
                find(chain)
        self._explain_the_rest()

    # --- layers and their activations -----------------------------------------------------------

    def _find_layers(self, chain: Chain) -> None:
        self._find_normalised(chain)
        for i, element in enumerate(chain):
            layers = element.of(fit.is_layer)
            end = pass_over(chain, i + 1)
            if not layers or element.place in self._gated or end == len(chain):
                continue
            activation, steps = chain[end], chain[i : end + 1]
            if not activation.is_activation():
                continue
            self._seen |= {id(v.value) for v in activation.values}
            if not all(e.step.is_sole for e in steps[1:] if e.step is not None):
                for value in layers:
                    self.skipped.setdefault(value.path, (SEEN, element.where))
                continue
            sets, _ = self._sets(steps, [layers], self._place_objection(steps, layers))
            if sets:
                kind = next(filter(None, activation.kinds()), "relu")
                given = activation.step.options().values() if activation.step else ()
                if any(isinstance(value, ast.AST) for value in given):
                    kind = kind.partition("_")[0]
                self.places[element.place] = Place(
                    element, sets, kind, activation, drops_before=drops(steps[1:-1])
                )
                self._choose(steps)

    def _sets(
        self, steps: Chain, columns: list[list[Value]], common: str | None = None
    ) -> tuple[list[list[Value]], bool]:
        """The layers that run together and can be one call, several times in a loop; whether some
        are that already. Of others the reason is noted."""
        first, found, is_any_fused = steps[0], [], False
        for values in zip(*columns):
            reasons = {v.path: reason for v in values if (reason := self._objection(v, common))}
            if not reasons and all(self._is_fused(steps, v) for v in values):
                reasons = {v.path: "already fused" for v in values}
                is_any_fused = True
            elif not reasons:
                found.append([*values])
            self.skipped |= {path: (reason, first.where) for path, reason in reasons.items()}
        return found, is_any_fused

    def _place_objection(self, steps: Chain, layers: list[Value]) -> str | None:
        """What stands in the way for whatever layer it is."""
        linear, activation = steps[0], steps[-1]
        if reason := self._owner_objection(linear.owner):
            return reason
        if activation.owner is not linear.owner:
            return "its activation lies in another container"
        if not linear.is_bare:
            return "it is given more than a tensor"
        kinds = set(activation.kinds(fit.plain_kind))
        found = [v.value for v in activation.of(fit.is_activation)]
        if isinstance(layers[0].value, nn.Conv2d) and "relu" not in kinds:
            return f"{type(found[0]).__name__}: a convolution can be fused with ReLU only"
        if kinds == {None}:
            return fit.activation_objection(found[0], activation.options())
        if drops(steps[1:-1]) and "relu" not in kinds:
            return "a dropout that acts in training stands before the activation"
        return None

    def _owner_objection(self, owner: nn.Module) -> str | None:
        is_own = "forward" in vars(owner)
        name = type(owner).__name__
        return f"{name} has a forward of its own, set on the object" if is_own else None

    def _objection(self, value: Value, common: str | None = None) -> str | None:
        reason = fit.layer_objection(value.value, self.is_sharded) or common
        return reason or (None if self._wants(value) else "filter_fn says no")

    def _wants(self, value: Value) -> bool:
        if self.filter_fn is None:
            return True
        if value.path not in self._asked:
            self._asked[value.path] = bool(self.filter_fn(value.path, value.value))
        return self._asked[value.path]

    def _is_fused(self, steps: Chain, value: Value) -> bool:
        if MARK not in vars(value.value):
            return False
        text, owner = steps[0].text, steps[0].owner
        if text is None:
            return MARK in vars(owner) and is_sequence_rewritten()
        return is_rewritten(text, (e.step for e in steps))

    def _choose(self, steps: Chain) -> None:
        """The steps are to be one call, or one step a call that may take a fused one's result."""
        if (text := steps[0].text) is not None:
            self.chosen.setdefault(text, set()).add(text.numbers_of(e.step for e in steps))

    def _find_normalised(self, chain: Chain) -> None:
        for layer, norm, activation in zip(chain, chain[1:], chain[2:]):
            found = [type(v.value) for v in norm.values if isinstance(v.value, nn.Module)]
            if layer.of(fit.is_layer) and activation.is_activation() and any(activation.kinds()):
                if any(issubclass(cls, BATCH_NORM) for cls in found):
                    self.skipped[layer.values[0].path] = NORMALISED + FOLD, layer.where
                elif any(cls.__name__.endswith("Norm") for cls in found):
                    self.skipped[layer.values[0].path] = NORMALISED, layer.where

    # --- gated layers, ``act(gate(x)) * up(x)`` -------------------------------------------------

    def _find_gated(self, chain: Chain) -> None:
        """Of a chain that begins with a product."""
        if not chain or not chain[0].parts:
            return
        element = chain[0]
        (act, *layers), *others = element.parts
        kinds = [kind for act, *_ in element.parts for kind in act.kinds(fit.plain_kind)]
        if not kinds or not all(kinds) or self._owner_objection(element.owner):
            return
        if any(p.values != q.values for _, *other in others for p, q in zip(layers, other)):
            return  # the two forms of a product are of different layers
        steps = self._with_down(chain)
        columns = [e.of(fit.is_linear) for e in (*layers, *steps[1:][-1:])]
        if len({*map(len, columns)}) > 1:
            return
        sets, is_any_fused = self._sets(steps, columns)
        if not sets and not is_any_fused:
            return
        self._gated |= {part.place for form in element.parts for part in form}
        self._gated.add(steps[-1].place)
        self._seen |= {id(v.value) for act, *_ in element.parts for v in act.values}
        if sets:
            has_down = len(steps) > 1
            self.places[element.place] = GatedPlace(
                *(element, sets, kinds[0], steps[-1]),
                drops_before=drops(steps[1:-1]),
                is_stacked=len(layers) == 1,
                has_down=has_down,
            )
            self._choose(steps)

    def _with_down(self, chain: Chain) -> Chain:
        """The product, with the layer that takes it where it may be one call with that."""
        end = pass_over(chain, 1)
        after = pass_over(chain, end + 1)
        if end == len(chain) or (after < len(chain) and chain[after].is_activation()):
            return chain[:1]  # or the layer is one call with that activation
        if not all(e.step.is_sole and not e.step.guard for e in chain[1 : end + 1]):
            return chain[:1]
        layers = chain[end].of(fit.is_linear)
        reasons = {v.path: reason for v in layers if (reason := self._objection(v))}
        is_one = layers and chain[end].is_bare
        if is_one:
            self.skipped |= {path: (reason, chain[end].where) for path, reason in reasons.items()}
        return chain[: end + 1] if is_one and not reasons else chain[:1]

    # --- the layers that follow -----------------------------------------------------------------

    def _link(self, chain: Chain) -> None:
        for element in chain:
            place = self.places.get(element.place)
            if place is None or place.activation is None or element is not place.first:
                continue
            if place.is_convolution:
                continue  # it hands no gradient over
            after = chain.index(place.activation) + 1
            end = pass_over(chain, after)
            place.drops_after = drops(chain[after:end])
            if end < len(chain):
                place.next = self._follower(chain[end])
                place.meets_parameters = any(has_parameters(v.value) for v in chain[end].values)
            elif following := self._following_in_family(element):
                place.next = self._follower(following)

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

    def _follower(self, element: Element) -> Place | None:
        """The layer of `element`, which is to take over the gradient of the one before."""
        layers = element.of(fit.is_linear)
        if not layers or self._owner_objection(element.owner):
            return None
        if element.place not in self.places:
            fitting = []
            for value in layers:
                if reason := self._objection(value):
                    self.skipped.setdefault(value.path, (reason, element.where))
                else:
                    fitting.append([value])
            if not fitting or not element.is_bare:
                return None
            self._choose([element])
            self.places[element.place] = Place(element, fitting)
        return self.places[element.place]

    def _follow_names(self, chain: Chain) -> None:
        """Layers that take a name to which the result of a fused call was given, in loops say."""
        for element in chain:
            if element.text is None or element.place in {*self.places, *self._gated}:
                continue
            name = getattr(element.step.data, "id", None)
            if name is None or not element.is_bare:
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
            place.activation.step.node
            for place in self.places.values()
            if place.activation and place.first.owner is owner and place.first.text
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
        owners = {place.first.owner for place in self.places.values()}
        for module, path in self.paths.items():
            if is_sequential(module) or isinstance(module, FUSED):
                continue  # no linear layer before that activation; fused already
            names = [
                name
                for name, child in module._modules.items()
                if child is not None and fit.activation_kind(child) and id(child) not in self._seen
            ]
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
        places = list(self.places.values())
        skipped = (Skipped(path, *reason) for path, reason in self.skipped.items())
        report = Report(tuple(blocks(places, self.paths)), tuple(skipped))
        if dry_run:
            return report
        sequences = [place.first.owner for place in places if place.first.text is None]
        rewrite(self.chosen, bool(sequences))
        layers = [v.value for place in places for v in place.layers]
        for module in (*sequences, *layers, *(v.value for v in self.following)):
            vars(module).setdefault(MARK, "default")
        for place in places if memory == "low" else ():
            for value in place.layers if place.memory_pays else ():
                vars(value.value)[MARK] = memory
        return report


def has_layer_for(module: nn.Module, activations: list[str]) -> bool:
    """Whether a child of `module` may be meant to apply one of its activations.

    Beside a batch normalisation a convolution seldom is, and those that are have their reason.
    """
    children = module._modules
    if any(map(fit.is_linear, children.values())):
        return True
    kinds = [fit.activation_kind(children[name]) for name in activations]
    norms = (isinstance(m, BATCH_NORM) for m in children.values())
    convolutions = (isinstance(m, nn.Conv2d) for m in children.values())
    return "relu" in kinds and not any(norms) and any(convolutions)
