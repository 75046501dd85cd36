"""torch.compile with our operators put in wherever a model's graph has room for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .. import _torch_internals


def compile_options(
    mode: str | None = None, options: dict[str, Any] | None = None, *, conv: bool = False
) -> dict[str, Any]:
    """Options for :func:`torch.compile` that put the fused operators into any model.

    ::

        options = torch_fused_linear.compile_options()
        model = torch.compile(model, options=options)
        model(x).sum().backward()
        print(options["pre_grad_custom_pass"].replaced)  # Counter({'mlp': 12})

    A pass over the captured graph, before autograd, puts in

    - ``fused::linear_relu``, ``linear_relu2``, ``linear_gelu`` and ``linear_silu`` for a linear
      layer, however it is spelled, with the activation after it. GELU keeps its kind;
    - ``fused::linear_glu`` for a gated layer, ``act(gate(x)) * up(x)``, with the linear layer after
      it ``fused::gated_mlp``;
    - ``fused::mlp`` for two or more layers in a chain, whose compiled backward has each hidden
      layer's activation gradient in the next one's step;
    - with ``conv=True``, ``fused::conv2d_relu`` for ``F.conv2d`` with ReLU; on a GPU only where the
      result is large and of a known size, as the compiler's kernel for bias and ReLU is quick.

    Where the compiler's own kernels are quicker on this GPU, an activation stays torch's behind
    ``fused::linear``, and a gated layer's backward has its pass in ATen. Two more passes let
    products add to gradients, for :func:`accumulate_gradients`.

    Layers of this package count as well: separate ones of a chain are joined. Whatever the
    operators would refuse is left alone. Each graph's replacements are logged by the logger
    ``"torch_fused_linear"`` at level ``INFO``; a graph that comes out of the compiler's cache
    counts no less.

    Args:
        mode: as :func:`torch.compile`'s, which does not take it together with options.
        options: more of Inductor's options.
        conv: whether convolutions with ReLU are replaced, too.

    Returns:
        A new dictionary; its ``"pre_grad_custom_pass"`` is the pass, whose ``replaced`` counts what
        was put in. The same entries work in
        ``torch._inductor.aoti_compile_and_package(program, inductor_configs=...)``.

    Raises:
        ValueError: ``options`` has a ``pre_grad_custom_pass`` already.
    """
    # The imports take a second, but the compiler needs them anyway.
    from .accumulated_weights import StoragesPass, WeightsPass
    from .fusion_pass import FusionPass

    if options and "pre_grad_custom_pass" in options:
        raise ValueError(
            "compile_options: options has a pre_grad_custom_pass already; call "
            "torch_fused_linear.graph.fusion_pass.FusionPass()(graph) in yours instead"
        )
    ours = {"pre_grad_custom_pass": FusionPass(conv), "joint_custom_pre_pass": WeightsPass()}
    ours["post_grad_custom_pre_pass"] = StoragesPass()
    return {**_torch_internals.options_of_mode(mode), **ours, **(options or {})}


class compile_backend:
    """A backend for :func:`torch.compile` that does the same before another backend.

    For Inductor with its options and modes, take :func:`compile_options`.

    Args:
        backend: the name of a backend, or a callable that takes a graph module and example inputs.
        conv: as :func:`compile_options`'s.

    Attributes:
        replaced: how many times each operator was put in, over all graphs so far.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is no backend of this name.
    """

    def __init__(self, backend: str | Callable = "inductor", *, conv: bool = False) -> None:
        from .fusion_pass import FusionPass

        self._fusion = FusionPass(conv)
        self._backend = _torch_internals.backend_of(backend)

    @property
    def replaced(self) -> Counter[str]:
        return self._fusion.replaced

    def __call__(self, module: torch.fx.GraphModule, example_inputs, **kwargs):
        from .fusion_pass import apply

        apply(module, self._fusion)
        return self._backend(module, example_inputs, **kwargs)
