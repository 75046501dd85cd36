"""What is to be fused in a model: all of it is judged before anything is changed."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from torch import nn

from .._torch_internals import forget_compiled
from ..activations import ACTIVATIONS
from . import families, plain
from .model import FUSED, Chain, Element, Model, functions_of, is_sequential, pass_over
from .plain import MARK
from .report import Block, Report, Skipped
from .rewrite import SEQUENTIAL, Roles, rewrite, roles_of, united
from .source import ORIGINALS, Text, code_of, key_of, place_of

Filter = Callable[[str, nn.Module], bool]

NORMALISED = "a normalisation stands between it and its activation"
FOLD = (
    "; fold it into the layer first, where it is not trained (torch.nn.utils.fuse_conv_bn_eval, "
    "fuse_linear_bn_eval)"
)
SEEN = "what it returns is read elsewhere too, or something runs before its activation does"
BATCH_NORM = nn.modules.batchnorm._BatchNorm
Names = list[str]


@dataclass(eq=False)
class Place:
    """A call of linear layers or convolutions, with that of the activation they are to apply."""

    steps: Chain  # the layer's call, or the product of a gated layer, and what is one with it
    # The layers of each call, several in a loop. Of a gated layer gate and up, or the one for both,
    # and the layer after them where it is part of the same call.
    sets: list[list[nn.Module]]
    kind: str = ""  # of the activation; empty for a layer alone
    drops_after: bool = False  # whether a dropout that can act follows
    next: "Place | None" = None  # the layer after them, which hands over its gradient
    meets_parameters: bool = False  # whether a module with some follows

    @property
    def is_gated(self) -> bool:
        return bool(self.steps[0].parts)

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for layers in self.sets for layer in layers]

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.layers[0], nn.Conv2d)

    @property
    def hands_over(self) -> bool:
        """Whether a linear layer after it may take part in its backward."""
        has_down = self.is_gated and len(self.steps) > 1
        return bool(self.kind) and not self.is_convolution and not has_down

    @property
    def memory_pays(self) -> bool:
        """Whether less is kept with low memory. GELU's and SiLU's output can be computed anew by
        the layer after it, and up's product in a gated block; ReLU's is kept by that layer, or by a
        normalisation or whatever else with parameters comes there, and bits of it beside that would
        be more."""
        if self.is_gated:
            return len(self.sets[0]) == 3 or (self.next is not None and not drops(self.steps))
        if self.is_convolution or not self.kind or len(self.layers) > 1:
            return False
        is_dropped = drops(self.steps) or self.drops_after
        meets_next = self.next is not None and not is_dropped
        if self.kind != "relu":
            return meets_next
        return not meets_next and (is_dropped or not self.meets_parameters)

    def operators(self, layers: list[nn.Module]) -> tuple[Names, Names]:
        """What runs for one call before it is fused, and after."""
        known = ACTIVATIONS.get(self.kind)  # not while it is open which of the two GELUs it is
        drop, label = ["Dropout"] * drops(self.steps), known.label if known else self.kind.upper()
        if not self.is_gated:
            fused = known.label_of_operator if known else "linear_gelu" if label else "linear"
            fused = "conv2d_relu" if self.is_convolution else fused
            return [*products(layers), *drop, *[label] * bool(label)], [fused, *drop]
        number = len(self.steps[0].parts[0]) - 1  # of layers without the one after them
        gate, up, down = layers[:1], layers[1:number], layers[number:]
        act = [label, *products(up)] if up else ["Chunk", label]
        before = [*products(gate), *act, "Mul", *drop, *products(down)]
        if down and drop:
            return before, [f"linear_glu ({label})", *drop, "linear"]
        return before, [f"{'gated_mlp' if down else 'linear_glu'} ({label})"]


def products(layers: list[nn.Module]) -> Names:
    """The operators of layers alone."""
    found = []
    for layer in layers:
        found.append("Conv2d" if isinstance(layer, nn.Conv2d) else "MatMul")
        found += ["BiasAdd"] * (layer.bias is not None)
    return found


class Plan:
    """Finds what can be fused."""

    def __init__(self, root: nn.Module, filter_fn: Filter | None) -> None:
        self.is_wanted = cache(filter_fn or (lambda path, layer: True))
        self.model = Model(root)
        self.paths = self.model.paths
        self.places: dict[tuple, Place] = {}  # by that of the first step
        self.chosen: dict[Text, Roles] = {}
        self.skipped = {path: (reason, "") for path, reason in self.model.frozen.items()}
        self._results: set[tuple] = set()  # names to which functions give what fused calls return
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
        for i, element in enumerate(chain):
            layers, end = element.of(plain.is_layer), pass_over(chain, i + 1)
            if not layers or element.place in self._gated or end == len(chain):
                continue
            if not chain[end].of(plain.is_activation):
                self._explain_normalised(chain[i : i + 3])
                continue
            activation, steps = chain[end], chain[i : end + 1]
            self._seen |= set(map(id, activation.values))
            if not all(e.step.is_sole for e in steps[1:]):
                self._skip(layers, SEEN, element)
                continue
            objection = self._place_objection(steps, layers)
            kind = next(filter(None, activation.kinds()), "relu")
            is_squared = any(e.step.is_sole and e.is_square() for e in chain[end + 1 : end + 2])
            if is_squared and kind == "relu" and end == i + 1 and plain.is_linear(layers[0]):
                steps, kind = chain[i : end + 2], "relu2"
            sets, _ = self._sets(steps, [layers], objection)
            _, is_all_known = activation.step.options()
            if not is_all_known:
                kind = kind.partition("_")[0]
            self._add(steps, sets, kind)

    def _sets(
        self, steps: Chain, columns: list[list[nn.Module]], common: str | None = None
    ) -> tuple[list[list[nn.Module]], bool]:
        """The layers that run together and can be one call, several times in a loop; whether some
        are that already. Of others the reason is noted."""
        found, is_any_fused = [], False
        for layers in zip(*columns):
            if self._is_refused(layers, steps[0], common):
                continue
            if all(self._is_fused(steps[0], layer) for layer in layers):
                self._skip(layers, "already fused", steps[0])
                is_any_fused = True
            else:
                found.append([*layers])
        return found, is_any_fused

    def _place_objection(self, steps: Chain, layers: list[nn.Module]) -> str | None:
        """What stands in the way for whatever layer it is."""
        linear, activation = steps[0], steps[-1]
        if "forward" in vars(linear.owner):
            return f"{type(linear.owner).__name__} has a forward of its own, set on the object"
        if activation.owner is not linear.owner:
            return "its activation lies in another container"
        if not linear.step.is_bare:
            return "it is given more than a tensor"
        kinds = set(activation.kinds(is_plain=True))
        found = activation.of(plain.is_activation)
        if isinstance(layers[0], nn.Conv2d) and "relu" not in kinds:
            return f"{type(found[0]).__name__}: a convolution can be fused with ReLU only"
        if kinds == {None} and found:
            return plain.activation_objection(found[0], activation.step.options()[0])
        if drops(steps[1:-1]) and "relu" not in kinds:
            return "a dropout that acts in training stands before the activation"
        return None

    def _is_refused(
        self, layers: Iterable[nn.Module], element: Element, common: str | None = None
    ) -> bool:
        """Whether one of the layers must be called as it is, for a reason of its own or another."""
        is_any = False
        for layer in layers:
            reason = plain.layer_objection(layer, self.is_sharded) or common
            if reason is None and not self.is_wanted(self.model.names.get(id(layer), ""), layer):
                reason = "filter_fn says no"
            if reason is not None:
                self._skip([layer], reason, element)
                is_any = True
        return is_any

    def _is_fused(self, element: Element, layer: nn.Module) -> bool:
        function = element.text.function if element.text else SEQUENTIAL
        marked = [layer] if element.text else [layer, element.owner]
        return key_of(function.__code__) in ORIGINALS and all(MARK in vars(m) for m in marked)

    def _skip(self, layers: Iterable[nn.Module], reason: str, element: Element) -> None:
        """Notes the reason for each that has none yet."""
        for layer in layers:
            path = self.model.names.get(id(layer), "")
            self.skipped.setdefault(path, (reason, element.where))

    def _add(self, steps: Chain, sets: list[list[nn.Module]], kind: str = "") -> None:
        """Has the steps become one call, or one step a call that may take a fused one's result."""
        if not sets:
            return
        place = self.places[steps[0].place] = Place(steps, sets, kind)
        if (text := steps[0].text) is None:
            return
        roles = roles_of(text, [e.step for e in steps])
        self.chosen[text] = united(self.chosen.get(text, {}), roles)
        statement = text.statement_of(steps[-1].step.node)
        if place.hands_over and isinstance(statement, ast.Assign):
            names = [getattr(target, "id", "") for target in statement.targets]
            self._results |= {(steps[0].owner, text, name) for name in names}

    # --- gated layers, ``act(gate(x)) * up(x)`` -------------------------------------------------

    def _find_gated(self, chain: Chain) -> None:
        """Of a chain that begins with a product."""
        if not chain or not chain[0].parts:
            return
        element = chain[0]
        (_, *layers), *others = element.parts
        kinds = [kind for act, *_ in element.parts for kind in act.kinds(is_plain=True)]
        if not kinds or not all(kinds) or "forward" in vars(element.owner):
            return
        if any(p.values != q.values for _, *other in others for p, q in zip(layers, other)):
            return  # the two forms of a product are of different layers
        steps = self._with_down(chain)
        columns = [e.of(plain.is_linear) for e in (*layers, *steps[1:][-1:])]
        if len({*map(len, columns)}) > 1:
            return
        sets, is_any_fused = self._sets(steps, columns)
        if sets or is_any_fused:
            self._gated |= {part.place for form in element.parts for part in form}
            self._gated.add(steps[-1].place)
            self._seen |= {id(value) for act, *_ in element.parts for value in act.values}
        self._add(steps, sets, kinds[0])

    def _with_down(self, chain: Chain) -> Chain:
        """The product, with the layer that takes it where that may be part of the same call."""
        end = pass_over(chain, 1)
        after = pass_over(chain, end + 1)
        if end == len(chain) or any(e.of(plain.is_activation) for e in chain[after : after + 1]):
            return chain[:1]  # or the layer is one call with that activation
        layers, steps = chain[end].of(plain.is_linear), [e.step for e in chain[1 : end + 1]]
        if not layers or not steps[-1].is_bare or any(s.guard or not s.is_sole for s in steps):
            return chain[:1]
        return chain[:1] if self._is_refused(layers, chain[end]) else chain[: end + 1]

    # --- the layers that follow -----------------------------------------------------------------

    def _link(self, chain: Chain) -> None:
        for element in chain:
            place = self.places.get(element.place)
            if place is None or not place.hands_over:
                continue
            after = chain.index(place.steps[-1]) + 1
            end = pass_over(chain, after)
            place.drops_after = drops(chain[after:end])
            if end < len(chain):
                place.next = self._follower(chain[end])
                found = chain[end].of(lambda value: isinstance(value, nn.Module))
                place.meets_parameters = any([*module.parameters()] for module in found)
            elif following := self._following_in_family(element):
                place.next = self._follower(following)

    def _following_in_family(self, element: Element) -> Element | None:
        path = families.next_linear_of(self.paths[element.owner], type(element.owner))
        if path not in self.model.modules:
            return None
        outer, _, name = path.rpartition(".")
        owner = self.model.modules[outer]
        for function in functions_of(type(owner)):
            if name in code_of(function).co_names:
                for found in (e for chain in self.model.read(owner, function) for e in chain):
                    if [*map(id, found.values)] == [id(self.model.modules[path])]:
                        return found
        return None

    def _follower(self, element: Element) -> Place | None:
        """The layer of `element`, which is to take over the gradient of the one before."""
        if element.place not in self.places and "forward" not in vars(element.owner):
            layers = element.of(plain.is_linear)
            sets = [[layer] for layer in layers if not self._is_refused([layer], element)]
            if element.step.is_bare:
                self._add([element], sets)
        return self.places.get(element.place) if element.of(plain.is_linear) else None

    def _follow_names(self, chain: Chain) -> None:
        """Layers that take a name to which the result of a fused call was given, in loops say."""
        for element in chain:
            result = element.owner, element.text, getattr(element.step.data, "id", None)
            if result in self._results and element.place not in self._gated:
                self._follower(element)

    # --- the rest -------------------------------------------------------------------------------

    def _explain_normalised(self, steps: Chain) -> None:
        if len(steps) < 3 or not any(steps[2].kinds()):
            return
        classes = [*map(type, steps[1].values)]
        is_batch_norm = any(issubclass(cls, BATCH_NORM) for cls in classes)
        if is_batch_norm or any(cls.__name__.endswith("Norm") for cls in classes):
            self._skip(steps[0].values[:1], NORMALISED + FOLD * is_batch_norm, steps[0])

    def _explain_the_rest(self) -> None:
        """Says why modules that look like a block, with activations of ours, are none."""
        owners = {place.steps[0].owner for place in self.places.values()}
        for module, path in self.paths.items():
            if is_sequential(module) or isinstance(module, FUSED):
                continue  # no linear layer before that activation; fused already
            held = module._modules.items()
            names = [n for n, m in held if plain.activation_kind(m) and id(m) not in self._seen]
            if module in self.model.unread:
                self.skipped[path] = self.model.unread[module]
            elif names and module not in owners and has_layer_for(module, names):
                code = getattr(getattr(type(module), "forward", None), "__code__", None)
                reason = (
                    f"the code of {type(module).__name__} does not show a layer's output going "
                    f"straight to {names[0]!r} and nowhere else"
                )
                self.skipped[path] = reason, place_of(code) if code else ""

    # --- carrying it out ------------------------------------------------------------------------

    def apply(self, memory: str, dry_run: bool) -> Report:
        """Changes the model. Nothing here can fail half way."""
        places = list(self.places.values())
        skipped = (Skipped(path, *reason) for path, reason in self.skipped.items())
        report = Report(tuple(blocks(places, self.model.names)), tuple(skipped))
        if dry_run:
            return report
        sequences = [p.steps[0].owner for p in places if p.steps[0].text is None]
        rewrite(self.chosen, bool(sequences))
        for module in (*sequences, *(layer for place in places for layer in place.layers)):
            vars(module).setdefault(MARK, "default")
        for place in places if memory == "low" else ():
            for layer in place.layers if place.memory_pays else ():
                vars(layer)[MARK] = memory
        if places:
            forget_compiled()
        return report


def drops(elements: Chain) -> bool:
    """Whether there is a dropout among them that can act, in training."""
    found = [value for element in elements for value in element.of(plain.is_passed)]
    return any(getattr(value, "p", 0) != 0 or not isinstance(value, nn.Module) for value in found)


def blocks(places: Iterable[Place], names: Mapping[int, str]) -> Iterator[Block]:
    """For the report: places one after the other."""
    followers = {id(place.next) for place in places}
    for place in places:
        if id(place) in followers or not place.kind:
            continue
        first, chain = place.steps[0], []
        operators: tuple[Names, Names] = [], []
        while place is not None and place not in chain:
            chain.append(place)
            for layers in place.sets:
                for whole, part in zip(operators, place.operators(layers)):
                    whole += [*part, *["Dropout"] * place.drops_after]
            place = place.next
        layers = tuple(names.get(id(layer), "") for place in chain for layer in place.layers)
        before, after = map(tuple, operators)
        kind = type(first.owner).__name__
        yield Block(names[id(first.owner)], kind, layers, before, after, first.where)


def has_layer_for(module: nn.Module, activations: list[str]) -> bool:
    """Whether a child of `module` may be meant to apply one of its activations, which beside a
    batch normalisation a convolution seldom is."""
    children = module._modules
    if any(map(plain.is_linear, children.values())):
        return True
    kinds = [plain.activation_kind(children[name]) for name in activations]
    norms = (isinstance(m, BATCH_NORM) for m in children.values())
    convolutions = (isinstance(m, nn.Conv2d) for m in children.values())
    return "relu" in kinds and not any(norms) and any(convolutions)
