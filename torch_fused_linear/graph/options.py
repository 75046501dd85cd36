"""``torch.compile`` with the fused operators put into a model's graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from .._support import torch_internals


def compile_options(
    mode: str | None = None, options: dict[str, Any] | None = None, *, conv: bool = False
) -> dict[str, Any]:
    """Returns options for :func:`torch.compile` that put the fused operators into any model.

    A pass over the captured graph, before autograd, puts in

    - ``fused::linear_relu``, ``linear_relu2``, ``linear_gelu`` and ``linear_silu`` for a linear
      layer, however it is spelled, with the activation after it. GELU keeps its form;
    - ``fused::linear_glu`` for a gated layer, ``act(gate(x)) * up(x)``, with the linear layer after
      it ``fused::gated_mlp``;
    - ``fused::mlp`` for two or more layers in a chain. Its compiled backward computes each hidden
      layer's activation derivative together with the next layer's product;
    - with ``conv=True``, ``fused::conv2d_relu`` for ``F.conv2d`` with ReLU; on a GPU only if the
      result is large and of a known size, because the compiler's kernel for bias and ReLU is fast.

    Where the compiler's own kernels are faster on this GPU, an activation stays torch's behind
    ``fused::linear``, and a gated layer's backward applies its derivative in ATen. Two more passes
    let products add to gradients, for :func:`accumulate_gradients`.

    Layers of this package are joined as well. Whatever the operators would refuse is left alone.
    The logger ``"torch_fused_linear"`` logs each graph's replacements at level ``INFO``, also for a
    graph that comes from the compiler's cache.

    Args:
        mode: a mode of :func:`torch.compile`, which does not accept it together with options.
        options: further options of Inductor.
        conv: whether convolutions with ReLU are replaced, too.

    Returns:
        A new dictionary. Its ``"pre_grad_custom_pass"`` is the pass, whose ``replaced`` counts the
        operators that were put in. The same entries work in
        ``torch._inductor.aoti_compile_and_package(program, inductor_configs=...)``.

    Raises:
        ValueError: ``options`` already has a ``pre_grad_custom_pass``.

    Examples::

        >>> options = compile_options()
        >>> model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), options=options)
        >>> options["pre_grad_custom_pass"].replaced
        Counter()
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
    return {**torch_internals.options_of_mode(mode), **ours, **(options or {})}


class compile_backend:
    """A backend for :func:`torch.compile` that puts in the fused operators before another backend
    runs.

    For Inductor with its options and modes, use :func:`compile_options`.

    Args:
        backend: the name of a backend, or a callable that takes a graph module and example inputs.
        conv: whether convolutions with ReLU are replaced, too.

    Attributes:
        replaced: how many times each operator was put in, over all graphs so far.

    Raises:
        torch._dynamo.exc.InvalidBackend: there is no backend of this name.

    Examples::

        >>> backend = compile_backend("eager")
        >>> plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        >>> y = torch.compile(plain, backend=backend)(torch.randn(4, 8))
        >>> backend.replaced
        Counter({'mlp': 1})
    """

    def __init__(self, backend: str | Callable = "inductor", *, conv: bool = False) -> None:
        from .fusion_pass import FusionPass

        self._fusion = FusionPass(conv)
        self._backend = torch_internals.backend_of(backend)

    @property
    def replaced(self) -> Counter[str]:
        return self._fusion.replaced

    def __call__(self, module: torch.fx.GraphModule, example_inputs, **kwargs):
        from .fusion_pass import apply

        apply(module, self._fusion)
        return self._backend(module, example_inputs, **kwargs)
