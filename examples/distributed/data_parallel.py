"""Data parallelism: each process has the whole model and a part of every batch.

    torchrun --nproc-per-node 2 examples/distributed/data_parallel.py

DistributedDataParallel puts its hooks on the parameters, where the gradients of fused layers arrive
as those of torch's: the layers hand gradients over to each other within every process.
"""

import torch.distributed as dist
from together import batches, compare, make_model, start, train
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
        print(f"handed over {report.handed_over} times in {len(data)} steps")
    compare("Data parallel", losses, device)


if __name__ == "__main__":
    main()
