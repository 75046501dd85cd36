"""Finds what is to be fused in a model: all of it is judged before anything is changed."""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .._support.torch_internals import forget_compiled
from ..activations import ACTIVATIONS
from ..nn.linear import FusedLinear
from . import plain
from .float8 import is_float8
from .model import FUSED, Chain, Element, Model, is_sequential, named, pass_over
from .report import Block, Report, Skipped
from .rewrite import SEQUENTIAL, Piece, Pieces, holds, rewrite
from .source import ORIGINALS, Text, key_of, place_of

Filter = Callable[[str, nn.Module], bool]

NORMALISED = "a normalisation stands between it and its activation"
FOLD = (
    "; fold it into the layer first, where it is not trained (torch.nn.utils.fuse_conv_bn_eval, "
    "fuse_linear_bn_eval)"
)
OUTSIDE = "its activation lies in another container"
ALONE = "no layer in FP8 follows straight upon the product"
MIXED = "some of its layers are in FP8 and others are not"
NO_CALL = "no method that can be followed calls it by a name or attribute that stands for it"
OTHER_CALL = "it is called with more than a tensor, by keyword, or in a function within a method"
OTHER_READ = "its weight is read by a method that does not call it"
OWN_FORWARD = "{} has a forward of its own, set on the object"
ATTENTION = (
    "{} multiplies by parameters of its own, in one function of torch's; an attention whose "
    "projections are nn.Linear layers can be followed"
)
SEEN = "what it returns is read elsewhere too, or something runs before its activation does"
BATCH_NORM = nn.modules.batchnorm._BatchNorm
Names = list[str]


@dataclass(eq=False)
class Unit:
    """A layer's call in a chain, with its activation; without one, the layer after others."""

    steps: Chain
    kind: str = ""  # of the activation
    drops_after: bool = False  # a dropout that can act follows

    @property
    def layers(self) -> list[nn.Module]:
        return self.steps[0].of(plain.is_layer)

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.layers[0], nn.Conv2d)

    @property
    def is_float8(self) -> bool:
        return is_float8(self.layers[0])

    def operators(self, layer: nn.Module) -> tuple[Names, Names]:
        """The operators that run for one layer before it is fused, and after."""
        known = ACTIVATIONS.get(self.kind)  # not while it is open which of the two GELUs it is
        drop, label = ["Dropout"] * drops(self.steps), known.label if known else self.kind.upper()
        fused = known.label_of_operator if known else "linear_gelu" if label else "linear"
        fused = "conv2d_relu" if self.is_convolution else fused
        if self.is_float8:
            fused = (
                f"float8_linear ({known.label if known else label})" if label else "float8_linear"
            )
        before = [*products([layer]), *drop, *[label] * bool(label)]
        after = ["Dropout"] * self.drops_after
        return [*before, *after], [fused, *drop, *after]


@dataclass(eq=False)
class Place:
    """Units one after the other that become one call, or a gated layer and the layer after it."""

    units: list[Unit]
    steps: Chain  # of all units
    rows: list[list[nn.Module]]  # the layers of each call, several in a loop
    kind: str = ""  # of a gated layer
    meets_parameters: bool = False  # a module with some follows

    @property
    def is_gated(self) -> bool:
        return not self.units

    @property
    def is_lone(self) -> bool:
        """Returns whether it is one layer's call, not a run."""
        return len(self.steps) == 1 and not self.is_gated

    def chained(self) -> int:
        """The number of units at the end that become one `mlp`, as run.py joins them."""
        if self.is_gated or len(self.units) < 2 or self.units[-1].kind:
            return 0
        count, kind = 1, self.units[-2].kind
        for unit in self.units[-2::-1]:
            acts = unit.drops_after or drops(unit.steps) or unit.is_convolution
            if unit.kind != kind or acts:
                break
            count += 1
        return count if count > 1 else 0

    def low_memory(self) -> Iterator[nn.Module]:
        """The layers of which less is kept with low memory: GELU's and SiLU's output is computed
        again in `mlp`, and so is a gated block's product with up. A ReLU that is alone keeps bits
        of its output, which pays unless the next module keeps the output anyway."""
        for row in self.rows:
            if self.is_gated:
                yield from row if len(row) == 3 or self.steps[-1].of(plain.is_linear) else ()
                continue
            chained = self.chained()
            yield from row[len(row) - chained :]
            for unit, layer in zip(self.units[: len(self.units) - chained], row):
                is_dropped = unit.drops_after or bool(drops(unit.steps))
                is_last = unit is self.units[-1]
                keeps_bits = is_dropped or (is_last and not self.meets_parameters)
                if unit.kind == "relu" and not unit.is_convolution and keeps_bits:
                    yield layer

    def operators(self, row: list[nn.Module]) -> tuple[Names, Names]:
        """The operators that run for one row of layers before it is fused, and after."""
        if self.is_gated:
            return self._gated_operators(row)
        before, after = [], []
        chained = self.chained()
        for unit, layer in zip(self.units, row):
            one, other = unit.operators(layer)
            before += one
            after += other
        if chained:
            known = ACTIVATIONS.get(self.units[-2].kind)
            number = f" × {chained}" if chained > 2 else ""
            name = "float8_mlp" if self.units[-1].is_float8 else "mlp"
            after[len(after) - chained :] = [f"{name} ({known.label if known else 'GELU'}){number}"]
        return before, after

    def _gated_operators(self, row: list[nn.Module]) -> tuple[Names, Names]:
        label, drop = ACTIVATIONS[self.kind].label, ["Dropout"] * drops(self.steps)
        number = len(self.steps[0].parts[0]) - 1  # of layers without the one after them
        gate, up, down = row[:1], row[1:number], row[number:]
        act = [label, *products(up)] if up else ["Chunk", label]
        before = [*products(gate), *act, "Mul", *drop, *products(down)]
        if is_float8(gate[0]):
            return before, [f"float8_gated_mlp ({label})"]
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

    def __init__(self, root: nn.Module, filter_fn: Filter | None, linear: bool = False) -> None:
        self.is_wanted = cache(filter_fn or (lambda path, layer: True))
        self.model = Model(root, with_layers=linear)
        self.paths = self.model.paths
        self.places: list[Place] = []
        self.lone: dict[int, nn.Module] = {}  # layers that also run alone
        self._runs_before: list[tuple[Chain, list[nn.Module]]] = []  # that are fused already
        self._with_sequential = False
        self.chosen: dict[Text, Pieces] = {}
        self.skipped = {path: (reason, "") for path, reason in self.model.frozen.items()}
        self._gated: set[tuple] = set()  # places of calls in gated layers
        self._seen: set[int] = set()  # activations that follow a layer somewhere
        bases = {base.__name__ for module in self.paths for base in type(module).__mro__}
        self.is_sharded = "FSDPModule" in bases  # whose layers have plain weights when they run
        chains = [chain for module in self.paths for chain in self.model.chains(module)]
        for find in (self._find_gated, self._find_units):
            for chain in chains:
                find(chain)
        calls = [*calls_in(chains)] if linear else []
        if linear:
            self._find_lone(calls)
        self._explain_the_rest()
        if linear:
            self._explain_unfollowed(calls)

    # --- layers and their activations -----------------------------------------------------------

    def _find_units(self, chain: Chain) -> None:
        """Groups of units that follow straight upon each other."""
        group: list[Unit] = []
        i = 0
        while i < len(chain):
            unit = None if chain[i].place in self._gated else self._unit(chain, i)
            if unit is None:
                self._explain_container(chain[i : i + 2])
                self._add_units(chain, group, i)
                group, i = [], i + 1
                continue
            if group and (unit.is_float8 is not group[-1].is_float8):
                self._add_units(chain, group, i)
                group = []
            if unit.is_convolution or (group and group[-1].is_convolution):
                self._add_units(chain, group, i)
                group = []
            end = i + len(unit.steps)
            i = pass_over(chain, end)
            unit.drops_after = drops(chain[end:i])
            group.append(unit)
        self._add_units(chain, group, len(chain))

    def _unit(self, chain: Chain, i: int) -> Unit | None:
        """The layer at this place with its activation, if one follows; the reason is noted where
        the two cannot be one call."""
        element, end = chain[i], pass_over(chain, i + 1)
        layers = element.of(plain.is_layer)
        if not layers or end == len(chain):
            return None
        activation, steps = chain[end], chain[i : end + 1]
        if not activation.of(plain.is_activation):
            self._explain_normalised(chain[i : i + 3])
            return None
        self._seen |= set(map(id, activation.values))
        are_sole = all(e.step.is_sole for e in steps[1:])
        if reason := self._place_objection(steps, layers) if are_sole else SEEN:
            self._skip(layers, reason, element)
            return None
        kind = next(filter(None, activation.kinds()), "relu")
        is_squared = any(e.step.is_sole and e.is_square() for e in chain[end + 1 : end + 2])
        if is_squared and kind == "relu" and end == i + 1 and plain.is_linear(layers[0]):
            steps, kind = chain[i : end + 2], "relu2"
        _, is_all_known = activation.step.options()
        return Unit(steps, kind if is_all_known else kind.partition("_")[0])

    def _add_units(self, chain: Chain, group: list[Unit], end: int) -> None:
        """Adds the units of a group, together with the layer after them, and each for itself."""
        if not group:
            return
        tail = self._tail(chain, group, end)
        start, stop = chain.index(group[0].steps[0]), end + bool(tail)
        whole = [*group, *([tail] if tail else [])]
        steps = chain[start:stop] if tail else chain[start : self._last(chain, group)]
        found = chain[end].of(lambda v: isinstance(v, nn.Module)) if end < len(chain) else []
        meets = any([*module.parameters()] for module in found)
        rows = self._rows(steps, [unit.layers for unit in whole], quiet=len(whole) > 1)
        together: set[int] = set()
        if len(whole) > 1 and rows and self._choose(steps):
            self.places.append(Place(whole, steps, rows))
            together = {id(layer) for row in rows for layer in row}
        for unit in group:
            rows = self._rows(unit.steps, [unit.layers])
            if rows and not self._choose(unit.steps):
                self._skip(unit.layers, SEEN, unit.steps[0])
                continue
            alone = [row for row in rows if id(row[0]) not in together]
            if alone:
                is_last = unit is group[-1]  # or the next unit has parameters
                self.places.append(Place([unit], unit.steps, alone, "", meets or not is_last))

    @staticmethod
    def _last(chain: Chain, group: list[Unit]) -> int:
        return chain.index(group[-1].steps[-1]) + 1

    def _tail(self, chain: Chain, group: list[Unit], end: int) -> Unit | None:
        """The layer after the group, which has no activation of ours."""
        between = chain[self._last(chain, group) : end + 1]
        if end >= len(chain) or not all(e.step.is_sole for e in between):
            return None
        element = chain[end]
        is_fit = element.of(plain.is_linear) and element.step.is_bare and not element.parts
        is_alone = element.owner is group[0].steps[0].owner
        is_alike = is_fit and Unit([element]).is_float8 is group[-1].is_float8
        return Unit([element]) if is_alike and is_alone else None

    def _choose(self, steps: Chain) -> bool:
        """Has the steps become one call; False where their code does not allow it."""
        text = steps[0].text
        if text is None:
            return True
        piece = Piece.of(text, [element.step for element in steps])
        if piece is None:
            return False
        resolver, region = steps[0].resolver, piece.region
        if region is not None and not all(map(resolver.is_stored, region.looked_up)):
            return False
        self.chosen.setdefault(text, {})[piece.key] = piece
        return True

    def _rows(
        self, steps: Chain, columns: list[list[nn.Module]], *, quiet: bool = False
    ) -> list[list[nn.Module]]:
        """The layers that run together and can be one call, several times in a loop. Of others the
        reason is noted, unless it is to be noted for each alone."""
        if len({*map(len, columns)}) != 1:
            return []
        found = []
        for row in map(list, zip(*columns)):
            if self._is_refused(row, steps[0], quiet=quiet):
                continue
            if len({*map(is_float8, row)}) > 1:
                if not quiet:
                    self._skip(row, MIXED, steps[0])
                continue
            if all(self._is_fused(steps[0], layer) for layer in row):
                self._runs_before.append((steps, row))
                if not quiet:
                    self._skip(row, "already fused", steps[0])
            else:
                found.append(row)
        return found

    def _place_objection(self, steps: Chain, layers: list[nn.Module]) -> str | None:
        """The reason against the place, for whatever layer it is."""
        linear, activation = steps[0], steps[-1]
        if "forward" in vars(linear.owner):
            return OWN_FORWARD.format(type(linear.owner).__name__)
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
        self, layers: Iterable[nn.Module], element: Element, *, quiet: bool = False
    ) -> bool:
        """Returns whether one of the layers must be called as it is."""
        is_any = False
        for layer in layers:
            reason = plain.layer_objection(layer, self.is_sharded)
            if reason is None and not self.is_wanted(self.model.names.get(id(layer), ""), layer):
                reason = "filter_fn says no"
            if reason is not None:
                if not quiet:
                    self._skip([layer], reason, element)
                is_any = True
        return is_any

    def _is_fused(self, element: Element, layer: nn.Module) -> bool:
        function = element.text.function if element.text else SEQUENTIAL
        return key_of(function.__code__) in ORIGINALS and plain.RULES.memory_of(layer) is not None

    def _skip(self, layers: Iterable[nn.Module], reason: str, element: Element) -> None:
        """Notes the reason for each that has none yet."""
        for layer in layers:
            path = self.model.names.get(id(layer), "")
            self.skipped.setdefault(path, (reason, element.where))

    # --- gated layers, ``act(gate(x)) * up(x)`` -------------------------------------------------

    def _find_gated(self, chain: Chain) -> None:
        """Adds the gated layer that a chain begins with, and the layer after it."""
        if not chain or not chain[0].parts:
            return
        element = chain[0]
        (_, *layers), *others = element.parts
        kinds = [kind for act, *_ in element.parts for kind in act.kinds(is_plain=True)]
        if not kinds or not all(kinds) or "forward" in vars(element.owner):
            return
        if any(p.values != q.values for _, *other in others for p, q in zip(layers, other)):
            return  # the two forms of a product are of different layers
        for steps in (self._with_down(chain), chain[:1]):
            columns = [e.of(plain.is_linear) for e in (*layers, *steps[1:][-1:])]
            if reason := self._float8_objection(element, steps, columns):
                is_refused = self._is_refused((m for row in columns for m in row), element)
                if not is_refused and layers[0].place not in self._gated:
                    self._skip(columns[0], reason, element)
                continue
            pairs = zip(*columns[: len(layers)])
            if any(len({*map(shape_of, pair)} - {None}) > 1 for pair in pairs):
                return  # they cannot be multiplied element by element
            rows = self._rows(steps, columns)
            is_any_fused = any(self._is_fused(element, m) for column in columns for m in column)
            if (rows or is_any_fused) and self._choose(steps):
                self._gated |= {part.place for form in element.parts for part in form}
                self._gated.add(steps[-1].place)
                self._seen |= {id(value) for act, *_ in element.parts for value in act.values}
                known = {id(layer) for place in self.places for row in place.rows for layer in row}
                rows = [row for row in rows if id(row[0]) not in known]
                if rows:
                    self.places.append(Place([], steps, rows, kinds[0]))

    @staticmethod
    def _float8_objection(element: Element, steps: Chain, columns: list) -> str | None:
        """Why layers in FP8 cannot be one gated block, or None."""
        if not any(is_float8(layer) for column in columns for layer in column):
            return None
        if any(form.number for form in element.step.forms):
            return "its second half is activated, and the two halves have one scale"
        return ALONE if len(steps) == 1 or drops(steps) else None

    def _with_down(self, chain: Chain) -> Chain:
        """The product, with the layer that takes it where that may be part of the same call."""
        end = pass_over(chain, 1)
        after = pass_over(chain, end + 1)
        if end == len(chain) or any(e.of(plain.is_activation) for e in chain[after : after + 1]):
            return chain[:1]  # or the layer is one call with that activation
        layers, steps = chain[end].of(plain.is_linear), [e.step for e in chain[1 : end + 1]]
        if not layers or not steps[-1].is_bare or any(not s.is_sole for s in steps):
            return chain[:1]
        return chain[:1] if self._is_refused(layers, chain[end]) else chain[: end + 1]

    # --- layers called alone --------------------------------------------------------------------

    def _find_lone(self, calls: Chain) -> None:
        """Adds the calls of single layers, those of a layer in a run as well: they stand where the
        run is as it was written."""
        in_runs, given = self._calls_in_runs(), []
        for element in calls:
            if element.resolver and element.resolver.is_given(element.step.callee):
                given.append(element)
            else:
                self._add_lone(element, element.of(is_for_lone), in_runs)
        for element in given:  # may be any layer: those that nothing else calls
            layers = [m for m in element.of(is_for_lone) if id(m) not in self.lone]
            self._add_lone(element, layers, in_runs)

    def _calls_in_runs(self) -> set[tuple]:
        """The calls of layers that are part of a run, and the layers."""
        found = set()
        runs = [(place.steps, row) for place in self.places for row in place.rows]
        for steps, row in (*runs, *self._runs_before):
            found |= {(e.place, id(layer)) for e in calls_in([steps]) for layer in row}
        return found

    def _add_lone(self, element: Element, layers: list[nn.Module], in_runs: set[tuple]) -> None:
        if "forward" in vars(element.owner):
            self._skip(layers, OWN_FORWARD.format(type(element.owner).__name__), element)
            return
        taken = [layer for layer in layers if not self._is_refused([layer], element)]
        found = []
        for layer in {id(layer): layer for layer in taken}.values():
            if self._is_lone(element, layer):
                self._skip([layer], "already fused", element)
            elif (element.place, id(layer)) not in in_runs:
                found.append([layer])
                self.skipped.pop(self.model.names.get(id(layer), ""), None)
            self.lone[id(layer)] = layer
            self._with_sequential |= element.text is None
        if taken and self._choose([element]) and found:
            self.places.append(Place([Unit([element])], [element], found))

    @staticmethod
    def _is_lone(element: Element, layer: nn.Module) -> bool:
        """Returns whether this call of the layer was found before."""
        if element.text is None:
            is_written = key_of(SEQUENTIAL.__code__) in ORIGINALS
        else:
            is_written = holds(Piece.of(element.text, [element.step]))
        return is_written and plain.RULES.runs_alone(layer)

    def _explain_unfollowed(self, calls: Chain) -> None:
        """Says of each layer that is left alone why no call of it is an operator."""
        for module, path in self.paths.items():
            if isinstance(module, nn.MultiheadAttention):
                self.skipped.setdefault(path, (ATTENTION.format(type(module).__name__), ""))
        inside = (*FUSED, nn.MultiheadAttention, FusedLinear)
        known = {id(m) for held in self.paths if isinstance(held, inside) for _, m in named(held)}
        self._explain_uses({element.place for element in calls}, known)
        for module, path in self.paths.items():
            if plain.is_linear(module) and id(module) not in self.lone.keys() | known:
                self.skipped.setdefault(path, (NO_CALL, ""))

    def _explain_uses(self, calls: set[tuple], known: set[int]) -> None:
        """Notes other calls of layers, and what reads a layer without calls."""
        for resolver in self.model.resolvers:
            for node in resolver.text.numbers:
                match node:
                    case ast.Call(used) if (resolver.owner, node) not in calls:
                        reason = OTHER_CALL
                    case ast.Attribute(used, "weight", ast.Load()):
                        reason = OTHER_READ
                    case _:
                        continue
                if resolver.is_given(used):
                    continue
                for layer in filter(plain.is_linear, resolver.values(used)):
                    is_other = reason is OTHER_CALL or id(layer) not in self.lone
                    if is_other and id(layer) not in known:
                        where = f"{resolver.text.code.co_filename}:{node.lineno}"
                        path = self.model.names.get(id(layer), "")
                        self.skipped.setdefault(path, (reason, where))

    # --- the rest -------------------------------------------------------------------------------

    def _explain_container(self, steps: Chain) -> None:
        """Notes that a layer at the end of an inner nn.Sequential has its activation outside."""
        values = steps[0].of(is_sequential) if len(steps) == 2 and not steps[0].text else []
        if not values or not steps[1].of(plain.is_activation):
            return
        last = [*values[0]._modules.values()][-1:]
        self._skip(filter(plain.is_layer, last), OUTSIDE, steps[0])

    def _explain_normalised(self, steps: Chain) -> None:
        if len(steps) < 3 or not any(steps[2].kinds()):
            return
        classes = [*map(type, steps[1].values)]
        is_batch_norm = any(issubclass(cls, BATCH_NORM) for cls in classes)
        if is_batch_norm or any(cls.__name__.endswith("Norm") for cls in classes):
            self._skip(steps[0].values[:1], NORMALISED + FOLD * is_batch_norm, steps[0])

    def _explain_the_rest(self) -> None:
        """Says why modules that look like a block, with activations of ours, are none."""
        owners = {place.steps[0].owner for place in self.places}
        for module, path in self.paths.items():
            if module in self.model.apart:
                held = module._modules.values()
                layers = [*filter(plain.is_layer, held)]
                is_left = any(id(layer) not in self.lone for layer in layers)
                if is_left and any(map(plain.is_activation, held)):
                    self.skipped[path] = self.model.apart[module], ""
            if is_sequential(module) or isinstance(module, FUSED):
                continue  # no linear layer before that activation; fused already
            held = module._modules.items()
            names = [
                n for n, m in held if plain.RULES.activation_kind(m) and id(m) not in self._seen
            ]
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
        skipped = (Skipped(path, *reason) for path, reason in self.skipped.items())
        report = Report(tuple(self._blocks()), tuple(skipped))
        if dry_run or not (self.places or self.lone):
            return report
        in_sequential = any(place.steps[0].text is None for place in self.places)
        rewrite(self.chosen, in_sequential or self._with_sequential)
        for place in self.places:
            for layer in (layer for row in place.rows for layer in row if not place.is_lone):
                plain.mark(layer, "default")
            for layer in place.low_memory() if memory == "low" else ():
                plain.mark(layer, memory)
        for layer in self.lone.values():
            plain.mark(layer, "alone")
        forget_compiled()
        return report

    def _blocks(self) -> Iterator[Block]:
        """For the report: each place once, though several functions may be one text."""
        known = set()
        for place in self.places:
            first = place.steps[0]
            if (first.place, kind := type(first.owner).__name__) in known:
                continue
            known.add((first.place, kind))
            before: Names = []
            after: Names = []
            for row in place.rows:
                one, other = place.operators(row)
                before += one
                after += other
            layers = tuple(self.model.names.get(id(m), "") for row in place.rows for m in row)
            path = self.model.names[id(first.owner)]
            yield Block(path, kind, layers, tuple(before), tuple(after), first.where)


def calls_in(chains: Iterable[Chain]) -> Iterator[Element]:
    """Yields the calls of a tensor and nothing else that may be of a layer."""
    for chain in chains:
        for first in chain:
            for element in (first, *(part for form in first.parts for part in form)):
                if element.of(is_for_lone) and element.step.is_bare:
                    yield element


def is_for_lone(value: object) -> bool:
    """Returns whether it is a layer that a call of ours may take alone, if it is plain."""
    return plain.is_linear(value) and not isinstance(value, FusedLinear)


def drops(elements: Chain) -> bool:
    """Returns whether a dropout among them can act in training."""
    found = [value for element in elements for value in element.of(plain.is_passed)]
    return any(getattr(value, "p", 0) != 0 or not isinstance(value, nn.Module) for value in found)


def shape_of(layer: nn.Module) -> torch.Size | None:
    """The shape of the weight that a layer holds; None if it has none, as many quantised ones, or
    none yet."""
    weight = layer._parameters.get("weight")
    return None if weight is None or is_lazy(weight) else weight.shape


def has_layer_for(module: nn.Module, activations: list[str]) -> bool:
    """Returns whether a child of `module` may be meant to apply one of its activations. Beside a
    batch normalisation a convolution seldom is.
    """
    children = module._modules
    if any(map(plain.is_linear, children.values())):
        return True
    kinds = [plain.RULES.activation_kind(children[name]) for name in activations]
    norms = (isinstance(m, BATCH_NORM) for m in children.values())
    convolutions = (isinstance(m, nn.Conv2d) for m in children.values())
    return "relu" in kinds and not any(norms) and any(convolutions)
