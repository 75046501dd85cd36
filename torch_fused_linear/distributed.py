"""Plans of ``parallelize_module`` for this package's modules.

The layers take torch's own, ``ColwiseParallel`` and ``RowwiseParallel``. Imported by who needs it:
it brings ``torch.distributed.tensor`` with it.
"""

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from .nn.mlp import FusedMLP

__all__ = ["MLPParallel"]


class MLPParallel(ParallelStyle):
    """Tensor parallelism of a :class:`~torch_fused_linear.FusedMLP`, which stays one operator.

    Layers are sharded in pairs, one by column and the next by row, so that what lies between the
    two is never gathered; of an odd number the last is replicated. ``ColwiseParallel`` and
    ``RowwiseParallel`` for its children work as well, but put hooks on them, and the children then
    run one by one, without fusion::

        parallelize_module(block, mesh, {"mlp": MLPParallel()})

    Args:
        input_layouts: of the input, where it is no DTensor yet. Default: replicated.
        output_layouts: wanted of the output. Default: replicated.
        use_local_output: whether the output is this device's own part, an ordinary tensor, instead
            of a DTensor. Default: ``True``.

    Raises:
        NotImplementedError: applied to a module that is no ``FusedMLP``.
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
        if not isinstance(module, FusedMLP):
            raise NotImplementedError(f"MLPParallel: expected a FusedMLP, got {type(module)}")
        return distribute_module(
            module, device_mesh, self._shard, self._prepare_input, self._prepare_output
        )

    def _shard(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if not isinstance(module, FusedMLP):
            return
        layers = list(module)[::2]
        place = partial(distribute_tensor, device_mesh=mesh, src_data_rank=self.src_data_rank)
        for k, layer in enumerate(layers):
            by_column = k % 2 == 0 and k + 1 < len(layers)
            row = Shard(1) if k % 2 else Replicate()
            placements = {
                "weight": Shard(0) if by_column else row,
                "bias": Shard(0) if by_column else Replicate(),
            }
            for key, parameter in list(layer.named_parameters(recurse=False)):
                sharded = place(parameter, placements=[placements[key]])
                wants_grad = parameter.requires_grad
                layer.register_parameter(key, nn.Parameter(sharded, requires_grad=wants_grad))

    def _prepare_input(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh):
        input = inputs[0]
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, self.input_layouts, run_check=False)
        return input.redistribute(placements=(Replicate(),), async_op=True)

    def _prepare_output(self, module: nn.Module, output: DTensor, mesh: DeviceMesh):
        output = output.redistribute(placements=self.output_layouts, async_op=True)
        return output.to_local() if self.use_local_output else output
