"""The style of ``parallelize_module`` for this package's blocks.

Single layers use PyTorch's own styles, ``ColwiseParallel`` and ``RowwiseParallel``. Import this
module by its name; it imports ``torch.distributed.tensor``.
"""

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from .nn.gated import FusedGatedMLP
from .nn.mlp import FusedMLP

__all__ = ["MLPParallel"]


def _sharded_layers(module: nn.Module) -> list[tuple[nn.Module, Placement, Placement]]:
    """Returns the layers of a block with the placements of their weights and biases."""
    column, row = (Shard(0), Shard(0)), (Shard(1), Replicate())
    if isinstance(module, FusedGatedMLP):
        gate, up, down = module.gate_proj, module.up_proj, module.down_proj
        return [(gate, *column), (up, *column), (down, *row)]
    layers = list(module)[::2]
    placed = [(layer, *(row if k % 2 else column)) for k, layer in enumerate(layers)]
    if len(layers) % 2:
        placed[-1] = (layers[-1], Replicate(), Replicate())
    return placed


class MLPParallel(ParallelStyle):
    """Tensor parallelism for a ``FusedMLP`` or ``FusedGatedMLP``, which stays one operator.

    The activations between two layers are never gathered. Gate and up of a
    :class:`~torch_fused_linear.FusedGatedMLP` are sharded by column and down by row. The layers of
    a :class:`~torch_fused_linear.FusedMLP` are sharded in the same way, in pairs; the last of an
    odd number is replicated. ``ColwiseParallel`` and ``RowwiseParallel`` for the children work as
    well, but put hooks on them, and the children then run one by one, without fusion.

    Args:
        input_layouts: placement of the input, if it is no DTensor yet. Default: replicated.
        output_layouts: placement of the output. Default: replicated.
        use_local_output: whether the output is this device's own part, an ordinary tensor, instead
            of a DTensor. Default: ``True``.

    Raises:
        NotImplementedError: it is applied to another module.

    Examples::

        >>> # needs several processes
        >>> parallelize_module(block, mesh, {"mlp": MLPParallel()})
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, (FusedMLP, FusedGatedMLP)):
            expected = "a FusedMLP or FusedGatedMLP"
            raise NotImplementedError(f"MLPParallel: expected {expected}, got {type(module)}")
        hooks = self._prepare_input, self._prepare_output
        return distribute_module(module, device_mesh, self._shard, *hooks)

    def _shard(self, name: str, module: FusedMLP | FusedGatedMLP, mesh: DeviceMesh) -> None:
        if name:  # a child, which is seen to with its parent
            return
        place = partial(distribute_tensor, device_mesh=mesh, src_data_rank=self.src_data_rank)
        for layer, weight, bias in _sharded_layers(module):
            for key, parameter in list(layer.named_parameters(recurse=False)):
                sharded = place(parameter, placements=[weight if key == "weight" else bias])
                layer.register_parameter(key, nn.Parameter(sharded, parameter.requires_grad))

    def _prepare_input(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh):
        input = inputs[0]
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, self.input_layouts, run_check=False)
        return input.redistribute(placements=(Replicate(),), async_op=True)

    def _prepare_output(self, module: nn.Module, output: DTensor, mesh: DeviceMesh):
        output = output.redistribute(placements=self.output_layouts, async_op=True)
        return output.to_local() if self.use_local_output else output
