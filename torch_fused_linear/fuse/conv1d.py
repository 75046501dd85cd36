"""GPT-2's linear layer. Importing this file imports transformers."""

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ..functional import linear, linear_gelu, linear_relu
from ..nn.linear import memory_repr


class FusedConv1D(Conv1D):
    r"""Applies :math:`y = \mathrm{act}(xW + b)`: transformers' ``Conv1D`` and an activation.

    Shape:
        - Input: :math:`(*, \text{nx})`.
        - Output: :math:`(*, \text{nf})`.

    Attributes:
        weight: :math:`(\text{nx}, \text{nf})`, transposed with regard to :class:`torch.nn.Linear`.
        bias: :math:`(\text{nf})`.
        activation: ``'none'``, ``'relu'``, ``'gelu_tanh'`` or ``'gelu_erf'``.
        memory: ``'default'`` or ``'low'``.
    """

    activation: str
    memory: str = "default"

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t()  # a view: the operators take any strides
        if self.activation == "none":
            return linear(x, weight, self.bias)
        if self.activation == "relu":
            return linear_relu(x, weight, self.bias, self.memory)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return linear_gelu(x, weight, self.bias, approximate, self.memory)

    def __repr__(self) -> str:
        text = f"FusedConv1D(nf={self.nf}, nx={self.nx}, activation={self.activation!r}"
        return text + memory_repr(self.memory) + ")"
