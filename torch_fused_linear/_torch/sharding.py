"""How the operators run on tensors that are sharded over devices (DTensor).

A tensor of a rule is written by the names of its dimensions, as in an einsum. Sharding one of these
names shards every tensor that has it: by rows (a dimension of the batch), by column (``o``, the
outputs of a layer) or by row of Megatron's tensor parallelism (``i``, its inputs). What has not got
the name is replicated, and a result that is a sum over it is a partial sum on each device. DTensor
chooses among these ways the one that has to move the least, and moves it.

Autograd runs above DTensor: the nodes call the operators that are listed here, forward and
backward, and those run on what each device holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._support import torch_internals
from .._support.when_imported import when_imported
from ..activations import ACTIVATIONS, NUMBERS, OPERATORS
from . import subclasses

# ReLU's bits come in groups of this many features, which a shard must not cut.
_MASK_BITS = 128


@dataclass(frozen=True)
class Rule:
    """The dimensions of an operator's tensors; ``*`` are all leading ones of the first."""

    inputs: Mapping[str, str]  # of each argument that is a tensor
    outputs: Mapping[str, tuple[str, str]]  # of each result, with those that it is a sum over
    shardable: str  # the dimensions that may be sharded
    added: tuple[str, ...] = ()  # arguments added to a result, a part of a partial sum as well


def _rule(text: str, shardable: str, *added: str) -> Rule:
    """A rule as the table has it: ``argument:dimensions -> result:dimensions/sum``."""
    inputs, outputs = ([part.split(":") for part in side.split()] for side in text.split("->"))
    results = {name: tuple(f"{of}/".split("/")[:2]) for name, of in outputs}
    return Rule(dict(inputs), results, shardable, added)


_LAYER = "input:*i weight:oi bias:o"
_BACKWARD = "grad_output:*o input:*i weight:oi saved:*o"
_GATED = "input:*i gate:hi up:hi gate_bias:h up_bias:h"
_IMAGE = "*o"  # neighbouring pixels meet in a convolution
_GRADIENTS = "grad_weight:oi/* grad_bias:o/*"

RULES = {
    "linear": _rule(f"{_LAYER} -> :*o/i", "*oi", "bias"),
    # An activation needs the whole sum, so that the inputs are not sharded.
    **dict.fromkeys(OPERATORS, _rule(f"{_LAYER} -> :*o", "*o")),
    "_linear_aux": _rule(f"{_LAYER} -> output:*o saved:*o", "*o"),
    "_linear_relu_bits": _rule(f"{_LAYER} -> output:*o mask:*o", "*o"),
    "_relu_mask": _rule("output:*o -> mask:*o", "*o"),
    "_activation_backward": _rule(
        "grad_output:*o saved:*o -> grad_preactivation:*o grad_bias:o/*", "*o"
    ),
    "_linear_backward": _rule(f"{_BACKWARD} -> grad_input:*i/o {_GRADIENTS}", "*oi"),
    # act' of the layer before is linear in the gradient: it may be applied to a partial sum.
    "_linear_backward_across": _rule(
        f"{_BACKWARD} previous_saved:*i -> grad_previous_preactivation:*i/o {_GRADIENTS} "
        "grad_previous_bias:i/*o",
        "*oi",
    ),
    "linear_glu": _rule(f"{_GATED} -> :*h", "*h"),
    # Column, then row: what is between is never gathered.
    "gated_mlp": _rule(f"{_GATED} down:oh down_bias:o -> :*o/h", "*ho", "down_bias"),
    "_linear_glu_aux": _rule(
        f"{_GATED} -> output:*h gate_preactivation:*h up_preactivation:*h", "*h"
    ),
    "_glu": _rule("gate:*h up:*h -> :*h", "*h"),
    "_glu_backward": _rule(
        "grad_output:*h gate:*h up:*h -> "
        "grad_gate:*h grad_up:*h grad_gate_bias:h/* grad_up_bias:h/* output:*h",
        "*h",
    ),
    "conv2d_relu": _rule("input:*chw weight:ocxy bias:o -> :*ohw", _IMAGE),
    "_channels_relu_backward": _rule(
        "grad_output:*ohw output:*ohw -> grad_preactivation:*ohw grad_bias:o/*", _IMAGE
    ),
    "_conv2d_backward": _rule(
        "grad_output:*ohw input:*chw weight:ocxy -> "
        "grad_input:*chw/o grad_weight:ocxy/* grad_bias:o/*",
        _IMAGE,
    ),
}


# --- from rules to placements -------------------------------------------------------------------

_WHOLE, _SUM = "whole", "sum"  # beside the number of the dimension that is sharded


def _ways(rule: Rule, given: Mapping[str, Any], tensors: Mapping[str, Any], devices: int):
    """For each way to shard, how every result and every tensor among the arguments lies."""
    first = next(iter(tensors))
    leading = "0123456789"[: len(tensors[first].shape) + 1 - len(rule.inputs[first])]

    def dimensions(labels: str) -> str:
        return labels.replace("*", leading)

    sizes: dict[str, int] = {}
    cut_by_bits = set()  # the dimensions that stand in a mask
    for name, tensor in tensors.items():
        of = dimensions(rule.inputs[name])
        if tensor.tensor_meta.dtype == torch.uint8:
            cut_by_bits.add(of[-1])
        else:
            sizes.update(zip(of, tensor.shape))
    keeps_mask = "saved" in rule.outputs and given["activation"] == NUMBERS["relu"]
    if keeps_mask or "mask" in rule.outputs:
        cut_by_bits.add(dimensions(next(reversed(rule.outputs.values()))[0])[-1])

    def placed(labels: str, sharded: str, otherwise: str) -> int | str:
        of = dimensions(labels)
        return of.index(sharded) if sharded in of else otherwise

    yield [_WHOLE] * (len(rule.outputs) + len(tensors))
    for label in dimensions(rule.shardable):
        if label in cut_by_bits and sizes[label] % (_MASK_BITS * devices):
            continue
        if label == "o" and given.get("groups", 1) != 1:
            continue
        if label == "h" and "up" not in tensors:  # gate's rows stand before up's
            continue
        way = []
        for name, (labels, summed) in rule.outputs.items():
            otherwise = _SUM if label in dimensions(summed) else _WHOLE
            is_wanted = _is_wanted(name, rule, given)
            way.append(placed(labels, label, otherwise) if is_wanted else _WHOLE)
        for name in tensors:
            is_part = name in rule.added and _SUM in way
            way.append(placed(rule.inputs[name], label, _SUM if is_part else _WHOLE))
        yield way


def _register_rules() -> None:
    """Makes DTensor know the operators."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    collectives, schemas, strategies = torch_internals.dtensor()

    def placement(lies: int | str):
        return {_WHOLE: Replicate, _SUM: Partial}[lies]() if isinstance(lies, str) else Shard(lies)

    def strategy(op_schema):
        schema = op_schema.op._schema
        rule = RULES[schema.name.partition("::")[2]]
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, op_schema.args_schema)), **op_schema.kwargs_schema}
        known = schemas.OpStrategy
        tensors = {name: given[name] for name in names if isinstance(given.get(name), known)}
        mesh = op_schema.get_mesh_from_args()
        ways = [list(map(placement, way)) for way in _ways(rule, given, tensors, mesh.size())]
        expand = strategies.expand_to_full_mesh_op_strategy
        return expand(mesh, op_schema, ways, input_index=len(rule.outputs))

    for name in RULES:
        op = getattr(torch.ops.fused, name).default
        # Arguments that are no tensors decide on the results, all of them.
        is_tensor = ["Tensor" in str(argument.type) for argument in op._schema.arguments]
        first_other = [*is_tensor, False].index(False)
        info = schemas.RuntimeSchemaInfo(static_argnum=first_other, needs_pytree=True)
        strategies.register_op_strategy(op, info)(strategy)
    torch_internals.handle_on_dtensors(torch.ops.fused.mlp.default, _mlp)
    subclasses.know(DTensor, collectives.AsyncCollectiveTensor)
    subclasses.kernels.impl("_is_sharded", lambda t: isinstance(t, DTensor), "BackendSelect")


def _is_wanted(output: str, rule: Rule, arguments: Mapping[str, object]) -> bool:
    """Returns whether a forward keeps this tensor, or a backward is asked for this gradient."""
    if output in ("grad_up", "grad_up_bias", "up_preactivation") and arguments["up"] is None:
        return False
    if output in ("gate_preactivation", "up_preactivation"):
        return bool(arguments["keeps"])
    if "output_mask" in arguments and not output.startswith("grad_previous"):
        return bool(arguments["output_mask"][list(rule.outputs).index(output)])
    flag = {"grad_bias": "bias_grad", "grad_previous_bias": "previous_bias_grad"}.get(output)
    return bool(arguments.get(flag, True))


def _mlp(op, args, kwargs):
    """A chain without autograd: layer by layer, each of which chooses its own placements."""
    hidden, weights, biases, *rest = args
    act = ACTIVATIONS[rest[0] if rest else kwargs.get("activation", "relu")]
    layer = getattr(torch.ops.fused, act.operator)
    for weight, bias in zip(weights[:-1], biases[:-1]):
        hidden = layer(hidden, weight, bias, **act.options)
    return torch.ops.fused.linear(hidden, weights[-1], biases[-1])


def register_when_imported() -> None:
    """Registers once torch's module is there, whose import takes time."""
    when_imported("torch.distributed.tensor", _register_rules)
