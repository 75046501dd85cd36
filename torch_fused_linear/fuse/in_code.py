"""The functions that rewritten code calls: in C where that was built, else those of run.py."""

import operator
from functools import partial  # noqa: F401  (as the rest of this file's names)
from types import ModuleType

import torch
from torch import nn

from .._support import library
from .._support.torch_internals import learn_dynamo
from .._support.when_imported import when_imported
from ..activations import named_gelu
from . import plain
from . import run as decisions
from .plain import applied, method_pow  # noqa: F401
from .run import method_chunk  # noqa: F401

#: This module's name in the globals of a rewritten function.
NAME = "__torch_fused_linear__"
#: The name of a run's result, in a rewritten function, until it is given to the user's name.
RESULT = "__torch_fused_linear_result__"

_direct = library.direct if isinstance(library.direct, ModuleType) else decisions
# The functions of run.py that are in C where it was built.
IN_C = ("run", "nested", "alone", "leads", "sequence", "gated", "halves")
run, nested, alone, leads, sequence, gated, halves = (getattr(_direct, name) for name in IN_C)
method_relu, method_relu_, method_square = plain.METHODS.values()
power = operator.pow


def _teach_dynamo() -> None:
    """Lets torch.compile trace the Python of what is C, and ask the tables once, while it traces:
    else it would test before each call that they hold what they held."""
    learn_dynamo()
    for function in (plain.kind_of_class, named_gelu):
        torch.compiler.assume_constant_result(function)
    for name in IN_C if _direct is not decisions else ():
        as_c = torch.compiler.substitute_in_graph(getattr(_direct, name), skip_signature_check=True)
        as_c(getattr(decisions, name))


if _direct is not decisions:
    _direct.know(plain, decisions, nn.Linear, nn.Conv2d, nn.Module, nn.Sequential)
when_imported("torch._dynamo", _teach_dynamo)
