"""What the ranks run to see where ``fuse_`` leaves layers under torch's plans as they are."""

import torch
from meshes import device_type, mesh_of
from parallel_checks import batch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_fused_linear as tfl


class Own(ColwiseParallel):
    """A plan with a hook that an activation must not pass."""

    @staticmethod
    def _prepare_output_fn(layouts, use_local, module, output, mesh):
        return ColwiseParallel._prepare_output_fn(layouts, use_local, module, output, mesh) - 1


def hooks_around_layers():
    """What runs of a layer and ReLU after ``fuse_``, and that it is what ran before."""
    mesh = mesh_of((4,))
    whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    ways = {
        "fused": ColwiseParallel(**whole),
        "a sum to make": RowwiseParallel(**whole),
        "watched before": ColwiseParallel(**whole),
        "watched after": ColwiseParallel(**whole),
        "with keywords": ColwiseParallel(**whole),
        "a style of its own": Own(),
    }
    found = {}
    for how, plan in ways.items():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(device_type(), torch.float64)
        parallelize_module(model, mesh, {"0": plan})
        tfl.fuse_(model)
        if how == "watched before":
            model[0].register_forward_pre_hook(lambda _, given: (2 * given[0],))
        if how == "watched after":
            model[0].register_forward_hook(lambda _, given, output: output - 1)
        if how == "with keywords":
            model[0].register_forward_pre_hook(lambda *given: None, with_kwargs=True)
        x = batch(0)[0]
        want = model[1](model[0](x))
        with torch.no_grad(), tfl.explain() as report:
            got = model(x)
        torch.testing.assert_close(got, want.detach())
        found[how] = [call.operator for call in report.calls if call.operator != "linear"]
    return found
