"""Tensor parallelism of a feed-forward block: every process has a part of each weight.

    torchrun --nproc-per-node 2 examples/distributed/tensor_parallel.py

``MLPParallel`` divides the block's first layer by its outputs and the second by its inputs, so that
the hidden activations stay where they are, and one sum over the processes ends the block. The block
stays one operator.
"""

import torch.distributed as dist
from together import batches, compare, make_model, start, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import torch_fused_linear as tfl
from torch_fused_linear.distributed import MLPParallel


def main() -> None:
    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = make_model(device)
    for block in model:
        parallelize_module(block, mesh, {"mlp": MLPParallel()})
    data = batches(device)  # all processes have the same
    with tfl.explain() as report:
        losses = train(model, model.parameters(), data)
    if dist.get_rank() == 0:
        print("what ran on this process in the last step:")
        for call in report.calls[-8:]:
            print(f"    {call.operator} {call.shapes}")
    compare("Tensor parallel", losses, device)


if __name__ == "__main__":
    main()
