"""FSDP2: parameters, gradients and the optimizer's state are divided among the processes.

    torchrun --nproc-per-node 2 examples/distributed/fsdp2.py

``fully_shard`` gathers a block's parameters before it runs. Within a block the layers hand their
gradients over; where each layer is wrapped by itself, FSDP's hooks stand between them, and none is.
"""

import torch.distributed as dist
from together import batches, compare, make_model, say_what_ran, start, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_fused_linear as tfl


def main() -> None:
    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = make_model(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    data = batches(device, dist.get_rank(), dist.get_world_size())
    with tfl.explain() as report:
        losses = train(model, model.parameters(), data)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    if dist.get_rank() == 0:
        say_what_ran(report, len(data))
    compare("FSDP2", losses, device)


if __name__ == "__main__":
    main()
