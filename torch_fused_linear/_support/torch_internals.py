"""Uses of torch beyond its public interface, and differences between its releases.

A difference is found by looking for names, not by the number of the release. Modules of torch that
take long to import are imported when they are used. ``tests/integration/test_torch_internals.py``
checks that each name means what is written here. The C++ counterpart is
``csrc/core/torch_internals.h``.
"""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._C import Graph, Node, ScriptModule, TensorType, Value
from torch._jit_internal import BroadcastingList2
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling
from torch.jit._builtins import _register_builtin as register_builtin
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook
from torch.utils._contextlib import _DecoratorContextManager as DecoratorContextManager
from torch.utils._pytree import tree_leaves

#: The attributes of a module that hold the hooks of its calls, and what every module has of each.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Dynamo guards an entry of __dict__, and not more cheaply than an attribute: from 2.15 on.
GUARDS_ENTRIES = False
GLOBAL_HOOKS = tuple(getattr(nn.modules.module, f"_global{kind}") for kind in HOOKS)


def as_made(owner: type | ModuleType, name: str) -> object:
    """The function of this name, or what is none where somebody else has put another there."""
    found = vars(owner).get(name)
    homes = getattr(owner, "__module__", owner.__name__), "torch._tensor"
    is_own = getattr(found, "__globals__", {}).get("__name__", homes[0]) in homes
    return found if found is None or (is_own and inspect.isroutine(found)) else object()


def added_behaviour(module: nn.Module, hooks: Iterable[str] = HOOKS) -> str | None:
    """Returns what makes a call of the module more than its class's forward on its parameters.

    Args:
        module: any module.
        hooks: the attributes that hold hooks to look at.

    Returns:
        The rest of a sentence about the module, such as ``"has forward hooks"``, or None.
    """
    own, is_traced = module.__dict__, is_dynamo_compiling()
    if is_traced:  # Dynamo guards what is looked up, an entry of __dict__ it may not
        _ = module.forward, type(module) is nn.Conv2d and module._conv_forward
    for kind in hooks:
        if getattr(module, kind, None) if is_traced and GUARDS_ENTRIES else own.get(kind):
            return f"has {kind.strip('_').replace('_', ' ')}"
    for name in ("forward", "_call_impl", "weight", "bias", "_conv_forward"):
        if name in own:
            return f"has a {name.strip('_')} of its own, set on the object"
    if own.get("_compiled_call_impl") is not None:
        return "was compiled"
    if not is_traced and "parametrizations" in own["_modules"]:  # else its class is another
        return "has a parametrisation"
    return None


def learn_dynamo() -> None:
    """Finds out what Dynamo guards; called when it has been imported."""
    global GUARDS_ENTRIES
    GUARDS_ENTRIES = hasattr(torch._dynamo.variables.dicts, "DunderDictVariable")


def function_modes() -> list:
    """The function modes in force, the outermost first."""
    return torch.overrides._get_current_function_mode_stack()


def floats_in(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors in lists, dictionaries and what else torch takes apart."""
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


# --- operators ----------------------------------------------------------------------------------


def has_kernel(operator: str, key: str) -> bool:
    """Returns whether an operator has a kernel of its own for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def aten_schemas() -> dict[str, list[torch.FunctionSchema]]:
    """The schemas of ATen's operators, by name."""
    dispatched = set(torch._C._dispatch_get_all_op_names())  # not TorchScript's of lists and dicts
    found = defaultdict(list)
    for schema in torch._C._jit_get_all_schemas():
        overload = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if schema.name.startswith("aten::") and overload in dispatched:
            found[schema.name.removeprefix("aten::")].append(schema)
    return found


# --- the compiler -------------------------------------------------------------------------------


def custom_graph_pass() -> type:
    """The base of a pass that says what it is, so that the compiler's caches know of it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def options_of_mode(mode: str | None) -> dict[str, Any]:
    """Inductor's options of a mode, which run a pass over the graph before autograd each time."""
    from torch._inductor import config, list_mode_options

    options = {} if mode in (None, "default") else list_mode_options(mode)
    if hasattr(config, "pre_grad_pass_timing"):  # from 2.13 on
        # Where its cache has the graph, it would not run the pass, and nothing would be counted.
        options["pre_grad_pass_timing"] = "early"
    return options


def trace_in_aten(function: Callable, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of a function, in the operators that Inductor takes."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), enable_python_dispatcher():
        return make_fx(function, select_decomp_table())(*examples)


def backend_of(name: str | Callable) -> Callable:
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def overlaps_collectives() -> bool:
    """Returns whether the compiler splits products beside collectives, to overlap the two."""
    from torch._inductor import config

    return config._micro_pipeline_tp


def runs_as_cuda_graphs() -> bool:
    """Returns whether the compiler captures CUDA graphs, as in its mode ``reduce-overhead``."""
    from torch._inductor import config

    return config.triton.cudagraphs


def forget_compiled() -> None:
    """Has torch.compile trace anew: it does not look whether functions that it traced through have
    other code, nor, on Python 3.13, always for attributes of modules."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset_code_caches()


# --- TorchScript --------------------------------------------------------------------------------


def copy_of_own_class(module: ScriptModule) -> ScriptModule:
    """Returns a module with these parameters and methods in a class that no other module has."""
    copy = torch._C._hack_do_not_use_clone_module_with_class(module, [], [])
    waiting = [(module, copy)]
    while waiting:
        old, new = waiting.pop()
        for held in (torch._C.ParameterDict, torch._C.BufferDict):
            for name, tensor in held(old).items():
                new.setattr(name, tensor)
        children = dict(torch._C.ModuleDict(new).items())
        waiting += [(child, children[name]) for name, child in torch._C.ModuleDict(old).items()]
    return copy


def script_graphs(module: ScriptModule) -> Iterator[Graph]:
    """The graph of each method, with what it calls in it and constants as such."""
    for name in module._method_names():
        graph = module._get_method(name).graph
        torch._C._jit_pass_inline(graph)
        torch._C._jit_pass_constant_propagation(graph)  # `if inplace` of F.relu, say
        torch._C._jit_pass_peephole(graph)
        yield graph


# --- distributed tensors ------------------------------------------------------------------------

_OTHER_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_OTHER_HOOKS += ("_forward_pre_hooks_with_kwargs",)
_HOOK_OF_DISTRIBUTE_MODULE = "torch.distributed.tensor._api", "distribute_module.<locals>.<lambda>"


def dtensor() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Returns the modules that DTensor's rules need: collectives, schemas, strategies."""
    from torch.distributed import _functional_collectives
    from torch.distributed.tensor import _op_schema
    from torch.distributed.tensor._ops import utils

    return _functional_collectives, _op_schema, utils


def handle_on_dtensors(operator: OpOverload, handler: Callable) -> None:
    """Has DTensor call ``handler(operator, args, kwargs)`` in place of an operator."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._custom_op_handlers[operator] = handler


def parallel_plan(layer: nn.Module) -> tuple[str, Iterable] | None:
    """The style of tensor parallelism whose two hooks are all that a layer has, and the layouts of
    the output."""
    own, styles = layer.__dict__, sys.modules.get("torch.distributed.tensor.parallel.style")
    if "_distribute_module_applied" not in own or any(map(own.get, _OTHER_HOOKS)):
        return None
    hooks = [*own["_forward_pre_hooks"].values()], [*own["_forward_hooks"].values()]
    given: dict[str, Any] = {}  # to distribute_module, whose hooks call it
    for hook in hooks[0] + hooks[1] if styles and [*map(len, hooks)] == [1, 1] else ():
        made_by = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
        if type(hook) is FunctionType and made_by == _HOOK_OF_DISTRIBUTE_MODULE:
            given |= zip(hook.__code__.co_freevars, (c.cell_contents for c in hook.__closure__))
    output = given.get("output_fn") if given.get("input_fn") else None
    for style in ("ColwiseParallel", "RowwiseParallel") if type(output) is partial else ():
        if output.func is getattr(styles, style)._prepare_output_fn:
            return style, output.args[0]
    return None
