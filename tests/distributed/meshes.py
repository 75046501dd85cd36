"""Meshes of the ranks at hand, and tensors laid out on them."""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard


def device_type():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@functools.cache
def mesh_of(shape):
    """(4,), (2, 2), or with a 2 the mesh of two that this rank is in, of two such."""
    if shape == (2,) and dist.get_world_size() == 4:
        names = ("pair", "in_pair")
        return init_device_mesh(device_type(), (2, 2), mesh_dim_names=names)["in_pair"]
    return init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def mine(cases, mesh):
    """The cases for the ranks of this mesh if there are several such meshes."""
    return cases[dist.get_rank() // mesh.size() :: dist.get_world_size() // mesh.size()]


def local_of(tensor, mesh, placements):
    """This rank's part of a tensor that all ranks know; of partial sums an arbitrary part."""
    for dim, placement in enumerate(placements):
        here, count = mesh.get_local_rank(dim), mesh.size(dim)
        if isinstance(placement, Shard):
            chunks = tensor.chunk(count, placement.dim)
            tensor = chunks[here] if here < len(chunks) else tensor.narrow(placement.dim, 0, 0)
        elif isinstance(placement, Partial):
            tensor = tensor * (-0.5 if here else 1 + 0.5 * (count - 1))
    return tensor.contiguous()


def spread(tensor, mesh, placements):
    """A distributed tensor with the values of one that all ranks know."""
    local = local_of(tensor, mesh, placements).to(device_type())
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).detach()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
