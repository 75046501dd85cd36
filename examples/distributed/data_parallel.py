"""Data parallelism: each process has the whole model and a part of every batch.

    torchrun --nproc-per-node 2 examples/distributed/data_parallel.py

DistributedDataParallel puts its hooks on the parameters, where the gradients of fused blocks arrive
as those of torch's: every block stays one operator.
"""

import torch.distributed as dist
from together import batches, compare, make_model, say_what_ran, start, train
from torch.nn.parallel import DistributedDataParallel

import torch_fused_linear as tfl


def main() -> None:
    device = start()
    model = DistributedDataParallel(make_model(device))
    data = batches(device, dist.get_rank(), dist.get_world_size())
    with tfl.explain() as report:
        losses = train(model, model.parameters(), data)
    # Each process has the loss of its part; all parts are of the same size.
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    if dist.get_rank() == 0:
        say_what_ran(report, len(data))
    compare("Data parallel", losses, device)


if __name__ == "__main__":
    main()
