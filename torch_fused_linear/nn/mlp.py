"""Several layers as one operator."""

import torch
from torch import Tensor, nn
from torch.types import Device

from .._support.arguments import Activation, Memory, Precision, check, check_precision
from .._support.torch_internals import added_behaviour, has_any_global_hook
from ..activations import ACTIVATIONS, name_of_module
from ..functional import float8_mlp, mlp
from .linear import memory_repr, precision_repr
from .taking_over import check_given_back, check_plain


class FusedMLP(nn.Sequential):
    r"""Applies linear layers with an activation between them and none after the last, as one
    operator.

    It *is* the ``nn.Sequential`` of ``nn.Linear`` and activation modules that it stands for, with
    the same ``state_dict``. It runs as :func:`torch_fused_linear.mlp`: the backward computes each
    hidden layer's activation derivative and bias gradient together with the next layer's product.
    If a child has hooks or a parametrisation, or was replaced, the children run one by one.

    Args:
        in_features: size of each input sample.
        features: sizes of the hidden layers and of the output, one or more.
        activation: ``'relu'`` (default), ``'gelu_tanh'``, ``'gelu_erf'``, ``'silu'`` or
            ``'relu2'``.
        bias: if ``False``, the layers have no bias. Default: ``True``.
        device: device of the parameters. Default: PyTorch's default device.
        dtype: dtype of the parameters: fp64, fp32, fp16 or bf16. Default: PyTorch's default dtype.
        memory: ``'default'``, or ``'low'`` to keep one tensor for each hidden layer of GELU or SiLU
            instead of two; the backward computes the other again. Default: ``'default'``.
        precision: ``'default'``, the dtype of the input, or ``'float8'`` to run
            :func:`torch_fused_linear.float8_mlp`; not together with ``memory='low'``. Children that
            run one by one do so in the dtype of the input. Default: ``'default'``.

    Shape:
        - Input: :math:`(*, \text{in\_features})`.
        - Output: :math:`(*, \text{features}_{-1})`.

    Raises:
        ValueError: ``features`` is empty, or ``activation``, ``memory`` or ``precision`` is none of
            these.
        RuntimeError: it is called under ``torch.jit.trace``, which cannot record it. Script it
            first.

    Examples::

        >>> model = FusedMLP(16, 64, 4, activation="gelu_erf")
        >>> model(torch.randn(8, 16)).shape
        torch.Size([8, 4])
    """

    __constants__ = ("activation", "memory", "precision")
    activation: Activation
    memory: Memory
    precision: Precision = "default"  # of one that was saved without it

    def __init__(
        self,
        in_features: int,
        *features: int,
        activation: Activation = "relu",
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        memory: Memory = "default",
        precision: Precision = "default",
    ) -> None:
        if not features:
            raise ValueError(f"FusedMLP: expected in_features and sizes, got {in_features!r} alone")
        check("FusedMLP", activation=activation, memory=memory)
        check_precision("FusedMLP", precision, memory)
        modules: list[nn.Module] = []
        for size_in, size_out in zip((in_features, *features), features):
            modules += [nn.Linear(size_in, size_out, bias, device, dtype)]
            modules += [ACTIVATIONS[activation].module()]
        super().__init__(*modules[:-1])
        self.activation = activation
        self.memory = memory
        self.precision = precision

    @classmethod
    def from_sequential(
        cls,
        sequential: nn.Sequential,
        *,
        memory: Memory = "default",
        precision: Precision = "default",
    ) -> "FusedMLP":
        """Makes a fused MLP of the modules of ``sequential``: the same objects, not copies.

        Args:
            sequential: exactly an ``nn.Sequential`` or ``FusedMLP``, without hooks or parameters of
                its own. It must hold ``nn.Linear`` modules with ``nn.ReLU``, ``nn.SiLU`` or one
                form of ``nn.GELU`` between them. The modules keep their own hooks.
            memory: ``'default'`` or ``'low'``.
            precision: ``'default'`` or ``'float8'``.

        Returns:
            The fused MLP, in the mode (training or not) of ``sequential``.

        Raises:
            TypeError: ``sequential`` is something else, a subclass, or has more than its modules.
            ValueError: it holds other modules, or ``memory`` or ``precision`` is neither of these.

        Examples::

            >>> plain = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
            >>> model = FusedMLP.from_sequential(plain)
            >>> x = torch.randn(8, 16)
            >>> torch.testing.assert_close(model(x), plain(x))
        """
        check("FusedMLP.from_sequential", memory=memory)
        check_precision("FusedMLP.from_sequential", precision, memory)
        check_plain("FusedMLP.from_sequential", sequential, (nn.Sequential, cls))
        modules = list(sequential)
        linears, between = modules[::2], modules[1::2]
        names = {name_of_module(module) for module in between}
        are_linear = all(isinstance(module, nn.Linear) for module in linears)
        if len(modules) % 2 == 0 or not are_linear or None in names or len(names) > 1:
            got = ", ".join(type(module).__name__ for module in modules) or "()"
            chain = "nn.Linear modules with one kind of nn.ReLU, nn.SiLU or nn.GELU between them"
            raise ValueError(f"FusedMLP.from_sequential: expected {chain}, got {got}")
        mlp = cls.__new__(cls)
        nn.Sequential.__init__(mlp, *modules)
        mlp.activation = names.pop() if names else "relu"
        mlp.memory = memory
        mlp.precision = precision
        return mlp.train(sequential.training)

    def to_sequential(self) -> nn.Sequential:
        """Returns a plain ``nn.Sequential`` of the same modules.

        Returns:
            The plain chain, in the mode (training or not) of this one.

        Raises:
            TypeError: something of the chain itself, not of its modules, would be lost, as for
                :meth:`FusedLinear.to_linear`.

        Examples::

            >>> len(FusedMLP(16, 64, 4).to_sequential())
            3
        """
        check_given_back("to_sequential", self, (FusedMLP,))
        return nn.Sequential(*self).train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        if torch.jit.is_scripting():
            for module in self:
                if hasattr(module, "weight"):
                    weights.append(module.weight)
                    biases.append(module.bias)
        elif not self._runs_as_one():
            return super().forward(input)
        elif torch.jit.is_tracing():
            raise RuntimeError(
                "FusedMLP: torch.jit.trace cannot record fused::mlp, whose biases are a list of "
                "optional tensors. Script it, torch.jit.script(mlp), alone or as a part of the "
                "model that is traced, or trace mlp.to_sequential(), which is not fused"
            )
        else:  # without asking every activation for a weight
            layers = list(self._modules.values())[::2]
            weights, biases = [m.weight for m in layers], [m.bias for m in layers]
        if self.precision == "float8":
            return float8_mlp(input, weights, biases, self.activation)
        return mlp(input, weights, biases, self.activation, memory=self.memory)

    def extra_repr(self) -> str:
        return (memory_repr(self.memory) + precision_repr(self.precision)).removeprefix(", ")

    def __getitem__(self, index):
        if isinstance(index, slice):
            return nn.Sequential(*list(self)[index])
        return super().__getitem__(index)

    def __prepare_scriptable__(self) -> nn.Module:
        # A script cannot change later: a chain that runs layer by layer now is scripted that way.
        return self if self._runs_as_one() else self.to_sequential()

    @torch.jit.unused
    def _runs_as_one(self) -> bool:
        if len(self) % 2 == 0 or has_any_global_hook():
            return False
        modules = list(self)
        are_linear = all(type(module) is nn.Linear for module in modules[::2])
        are_between = all(name_of_module(m) == self.activation for m in modules[1::2])
        return are_linear and are_between and not any(map(added_behaviour, modules))
