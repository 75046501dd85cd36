"""Which gated layers, ``act(gate(x)) * up(x)``, are to be one call, with the layer after each."""

from __future__ import annotations

from . import fit
from .chains import Chain, Element, Gated, drops, is_activation, pass_over
from .resolve import Value

FILTERED = "filter_fn says no"


class GatedPlan:
    """The part of a plan that finds them."""

    def _find_gated(self, chain: Chain) -> None:
        """Of a chain that begins with a product."""
        if not chain or not chain[0].parts:
            return
        element, parts = chain[0], [part for form in chain[0].parts for part in form]
        acts = [act for act, *_ in element.parts]
        kinds = [kind for act in acts for kind in plain_kinds(act)]
        (_, *layers), *others = element.parts
        if not kinds or not all(kinds) or self._owner_objection(element.owner):
            return
        if any(p.values != q.values for _, *other in others for p, q in zip(layers, other)):
            return  # the two forms of a product are of different layers
        down = self._down_of(chain)
        last = element if down is None else down
        steps = chain[: chain.index(last) + 1]
        sets = self._sets(steps, [*layers, *([] if down is None else [down])])
        if sets is None:
            return
        self._gated |= {part.place for part in parts} | {last.place}
        for act in acts:
            self._seen |= {id(v.value) for v in act.values}
        if sets:
            found = Gated(element, [v for values in sets for v in values], kinds[0], sets=sets)
            found.is_stacked, found.down = len(layers) == 1, down
            found.drops_before = drops(steps[1:-1])
            found.activation = None if down else element  # beyond which `_link` looks
            self.layers[element.place] = found
            self._choose(steps)

    def _down_of(self, chain: Chain) -> Element | None:
        """The layer that takes the product and may be one call with it."""
        end = pass_over(chain, 1)
        after = pass_over(chain, end + 1)
        if end == len(chain) or (after < len(chain) and is_activation(chain[after])):
            return None  # or the layer is one call with that activation
        steps = [e.step for e in chain[1 : end + 1]]
        if not all(s.is_sole and not s.guard for s in steps):
            return None
        layers = chain[end].of(fit.is_linear)
        if not layers or not chain[end].step.is_bare:
            return None
        reasons = {v.path: reason for v in layers if (reason := self._objection(v))}
        self.skipped |= {path: (reason, chain[end].where) for path, reason in reasons.items()}
        return None if reasons else chain[end]

    def _sets(self, steps: Chain, layers: list[Element]) -> list[list[Value]] | None:
        """The layers that run together, several times in a loop; None if none can be fused."""
        element, found, is_fused = steps[0], [], False
        columns = [part.of(fit.is_linear) for part in layers]
        for values in zip(*columns) if len(set(map(len, columns))) == 1 else ():
            reasons = {v.path: reason for v in values if (reason := self._objection(v))}
            if not reasons and all(self._is_fused(element, steps, v) for v in values):
                reasons = {v.path: "already fused" for v in values}
                is_fused = True
            elif not reasons:
                found.append([*values])
            self.skipped |= {path: (reason, element.where) for path, reason in reasons.items()}
        return found if found or is_fused else None


def plain_kinds(act: Element) -> list[str | None]:
    if act.step.callee is None:  # h.relu()
        return ["relu"]
    return [fit.plain_kind(v.value, act.options()) for v in act.values]
