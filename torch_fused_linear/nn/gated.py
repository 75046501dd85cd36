"""The gated feed-forward block of language models as one operator."""

import torch
from torch import Tensor, nn
from torch.types import Device

from .._support.arguments import Activation, Memory, Precision, check, check_precision
from .._support.torch_internals import added_behaviour, has_any_global_hook
from ..activations import ACTIVATIONS
from ..functional import float8_gated_mlp, gated_mlp
from .linear import memory_repr, precision_repr
from .taking_over import check_plain


class FusedGatedMLP(nn.Module):
    r"""Applies a gated block, :math:`W_\text{down}(\text{act}(W_\text{gate}x) \odot W_\text{up}x)`,
    as one operator.

    It has the ``gate_proj``, ``up_proj`` and ``down_proj`` of LLaMA, Qwen, Mistral or Gemma, and
    their ``state_dict``. It runs as :func:`torch_fused_linear.gated_mlp`. If a child has hooks or a
    parametrisation, or was replaced, the children run one by one.

    A ``state_dict`` with gate and up in one ``gate_up_proj.weight``, gate's rows first, loads as
    well.

    Args:
        in_features: size of each input sample.
        hidden_features: size of the hidden activations.
        out_features: size of each output sample. Default: ``in_features``.
        bias: if ``True``, the three layers have a bias. Default: ``False``.
        activation: ``'silu'`` (default), ``'gelu_tanh'``, ``'gelu_erf'``, ``'relu'`` or
            ``'relu2'``.
        device: device of the parameters. Default: PyTorch's default device.
        dtype: dtype of the parameters: fp64, fp32, fp16 or bf16. Default: PyTorch's default dtype.
        memory: ``'default'``, or ``'low'`` to keep one tensor of the hidden size instead of two;
            the backward computes the product of ``up_proj`` again. Default: ``'default'``.
        precision: ``'default'``, the dtype of the input, or ``'float8'`` to run
            :func:`torch_fused_linear.float8_gated_mlp`; not together with ``memory='low'``.
            Children that run one by one do so in the dtype of the input. Default: ``'default'``.

    Shape:
        - Input: :math:`(*, \text{in\_features})`.
        - Output: :math:`(*, \text{out\_features})`.

    Attributes:
        gate_proj, up_proj: ``nn.Linear(in_features, hidden_features)``.
        down_proj: ``nn.Linear(hidden_features, out_features)``.

    Raises:
        ValueError: ``activation``, ``memory`` or ``precision`` is none of these.

    Examples::

        >>> block = FusedGatedMLP(64, 172)
        >>> block(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    __constants__ = ("activation", "memory", "precision")
    activation: Activation
    memory: Memory
    precision: Precision = "default"  # of one that was saved without it

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        activation: Activation = "silu",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        memory: Memory = "default",
        precision: Precision = "default",
    ) -> None:
        check("FusedGatedMLP", activation=activation, memory=memory)
        check_precision("FusedGatedMLP", precision, memory)
        super().__init__()
        out_features = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, out_features, bias, device, dtype)
        self.activation = activation
        self.memory = memory
        self.precision = precision

    @classmethod
    def from_modules(
        cls,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
        activation: Activation = "silu",
        *,
        memory: Memory = "default",
        precision: Precision = "default",
    ) -> "FusedGatedMLP":
        """Makes a gated block of three layers, which it shares: the same objects, not copies.

        Args:
            gate: the layer whose output the activation is applied to. Exactly an ``nn.Linear``,
                like the others, without hooks or anything else that the operator would not run.
            up: the layer whose output is multiplied by that.
            down: the layer that takes the product.
            activation: ``'silu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'relu'`` or ``'relu2'``.
            memory: ``'default'`` or ``'low'``.
            precision: ``'default'`` or ``'float8'``.

        Returns:
            The block, in the mode (training or not) of ``gate``.

        Raises:
            TypeError: one of the layers is something else, or has more than its parameters.
            ValueError: their sizes do not fit, or ``activation``, ``memory`` or ``precision`` is
                none of these.

        Examples::

            >>> gate, up, down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
            >>> block = FusedGatedMLP.from_modules(gate, up, down)
            >>> x = torch.randn(4, 8)
            >>> torch.testing.assert_close(block(x), down(F.silu(gate(x)) * up(x)))
        """
        function = f"{cls.__name__}.from_modules"
        check(function, activation=activation, memory=memory)
        check_precision(function, precision, memory)
        for layer in (gate, up, down):
            check_plain(function, layer, (nn.Linear,))
        if up.weight.shape != gate.weight.shape or down.in_features != gate.out_features:
            expected = "weights [hidden, in], [hidden, in] and [out, hidden]"
            shapes = ", ".join(str(list(layer.weight.shape)) for layer in (gate, up, down))
            raise ValueError(f"{function}: expected {expected}, got {shapes}")
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block.gate_proj, block.up_proj, block.down_proj = gate, up, down
        block.activation, block.memory, block.precision = activation, memory, precision
        return block.train(gate.training)

    def forward(self, input: Tensor) -> Tensor:
        if not torch.jit.is_scripting() and not self._runs_as_one():
            activated = ACTIVATIONS[self.activation](self.gate_proj(input))
            return self.down_proj(activated * self.up_proj(input))
        if self.precision == "float8":
            return float8_gated_mlp(
                input,
                self.gate_proj.weight,
                self.up_proj.weight,
                self.down_proj.weight,
                self.gate_proj.bias,
                self.up_proj.bias,
                self.down_proj.bias,
                activation=self.activation,
            )
        return gated_mlp(
            input,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            self.gate_proj.bias,
            self.up_proj.bias,
            self.down_proj.bias,
            activation=self.activation,
            memory=self.memory,
        )

    def extra_repr(self) -> str:
        about = memory_repr(self.memory) + precision_repr(self.precision)
        return f"activation={self.activation!r}{about}"

    @torch.jit.unused
    def _runs_as_one(self) -> bool:
        layers = self.gate_proj, self.up_proj, self.down_proj
        are_linear = all(type(layer) is nn.Linear for layer in layers)
        return are_linear and not (has_any_global_hook() or any(map(added_behaviour, layers)))

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        for name in ("weight", "bias"):
            both = state_dict.pop(f"{prefix}gate_up_proj.{name}", None)
            if both is not None:
                for layer, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    state_dict[f"{prefix}{layer}.{name}"] = half
        super()._load_from_state_dict(state_dict, prefix, *args)
