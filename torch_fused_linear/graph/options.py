"""torch.compile with our operators put in wherever a model's graph has room for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .fusion_pass import FusionPass


def compile_options(
    mode: str | None = None, options: dict[str, Any] | None = None, *, conv: bool = False
) -> dict[str, Any]:
    """Options for :func:`torch.compile` that put the fused operators into any model.

    ::

        options = torch_fused_linear.compile_options()
        model = torch.compile(model, options=options)
        model(x).sum().backward()
        print(options["pre_grad_custom_pass"].replaced)  # Counter({'mlp': 12})

    A pass over the captured graph, before autograd, replaces

    - a linear layer (``nn.Linear``, ``F.linear``, ``addmm`` or a matrix product and a sum; Hugging
      Face's ``Conv1D``) with ReLU, its square, GELU or SiLU after it by
      ``fused::linear_relu``, ``linear_relu2``, ``linear_gelu`` or ``linear_silu``. GELU keeps its
      kind, ``'tanh'`` or ``'none'``; the tanh form is also found where it is written out, as in
      Hugging Face's GPT-2 (with ``dynamic=True`` it is not: its constant is then no constant to
      the compiler; mark dimensions as dynamic instead);
    - a gated layer, ``act(gate(x)) * up(x)`` in either order, of two layers or of the halves of one
      (``gate, up = both(x).chunk(2, -1)``), by ``fused::linear_glu``, and with the linear layer
      after it by ``fused::gated_mlp``;
    - two or more such layers in a chain by ``fused::mlp``, whose compiled backward has each hidden
      layer's activation gradient in the next one's step. What is still to be done between two of
      them (dropout in training, a second use, other activations) ends the chain;
    - with ``conv=True``, ``nn.Conv2d`` or ``F.conv2d`` with ReLU after it by
      ``fused::conv2d_relu``. It is not the default: after a convolution the compiler has one
      kernel of its own for bias and ReLU, and ours is quicker in some models and slower in others.

    Layers of this package count as well: in a compiled graph separate ones do not hand gradients
    over to each other, and this joins them. Whatever the operators would refuse is left alone:
    other dtypes and devices, tensor subclasses, tensors written in place between the steps, steps
    under different modes, the bodies of ``torch.cond``, ``scan`` and the like. Each graph's
    replacements are logged by the logger ``"torch_fused_linear"`` at level ``INFO``; a graph that
    comes out of the compiler's cache counts no less.

    Args:
        mode: as :func:`torch.compile`'s, which does not take it together with options.
        options: more of Inductor's options.
        conv: whether convolutions with ReLU are replaced, too.

    Returns:
        A new dictionary; its ``"pre_grad_custom_pass"`` is the pass, whose ``replaced`` counts what
        was put in. The same entry works in ``torch._inductor.aoti_compile_and_package(program,
        inductor_configs=...)``.

    Raises:
        ValueError: ``options`` has a ``pre_grad_custom_pass`` already.
        RuntimeError: this torch has no such pass.
    """
    fusion = _make_pass(conv)
    # torch's own words for an unknown mode are good; the import takes a second, but the compiler
    # needs it anyway.
    from torch._inductor import config, list_mode_options

    if not hasattr(config, "pre_grad_custom_pass"):
        raise RuntimeError(_too_old("torch._inductor.config.pre_grad_custom_pass"))
    if options and "pre_grad_custom_pass" in options:
        raise ValueError(
            "compile_options: options has a pre_grad_custom_pass already; call "
            "torch_fused_linear.graph.fusion_pass.FusionPass()(graph) in yours instead"
        )
    chosen = {} if mode in (None, "default") else list_mode_options(mode)
    return {**chosen, **(options or {}), "pre_grad_custom_pass": fusion}


class compile_backend:
    """A backend for :func:`torch.compile` that does the same before another backend.

    ::

        backend = torch_fused_linear.compile_backend("aot_eager")
        model = torch.compile(model, backend=backend)

    For Inductor with its options and modes, take :func:`compile_options`.

    Args:
        backend: the name of a backend, or a callable that takes a graph module and example inputs.
        conv: as :func:`compile_options`'s.

    Attributes:
        replaced: how many times each operator was put in, over all graphs so far.

    Raises:
        RuntimeError: this torch has no passes with an identity for its caches.
        torch._dynamo.exc.InvalidBackend: there is no backend of this name.
    """

    def __init__(self, backend: str | Callable = "inductor", *, conv: bool = False) -> None:
        from torch._dynamo import lookup_backend

        self._fusion = _make_pass(conv)
        self._backend = lookup_backend(backend)

    @property
    def replaced(self) -> Counter[str]:
        return self._fusion.replaced

    def __call__(self, module: torch.fx.GraphModule, example_inputs, **kwargs):
        from .fusion_pass import apply

        apply(module, self._fusion)
        return self._backend(module, example_inputs, **kwargs)


def _make_pass(conv: bool) -> FusionPass:
    try:
        from .fusion_pass import FusionPass
    except ImportError as error:
        raise RuntimeError(_too_old("torch._inductor.custom_graph_pass")) from error
    return FusionPass(conv)


def _too_old(what: str) -> str:
    return (
        f"torch_fused_linear: passes over compiled graphs need {what}, which torch "
        f"{torch.__version__} does not have; use torch 2.11 or newer, or the layers of this package"
    )
