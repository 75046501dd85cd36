"""A user's program, which test_typing.py runs and gives to mypy and pyright."""

import torch
from typing_extensions import assert_type

import torch_fused_linear as tfl
from torch_fused_linear import FusedConv2dReLU, FusedLinear, FusedLinearGELU, FusedLinearReLU

plain = torch.nn.Linear(8, 16)
x, image = torch.randn(2, 8), torch.randn(1, 3, 6, 6)

assert_type(tfl.linear(x, plain.weight), torch.Tensor)
assert_type(tfl.linear_relu(x, plain.weight, plain.bias, memory="low"), torch.Tensor)
assert_type(tfl.linear_gelu(x, plain.weight, None, approximate="none"), torch.Tensor)
assert_type(tfl.mlp(x, [plain.weight], [None], activation="gelu_erf"), torch.Tensor)

assert_type(FusedLinearReLU.from_linear(plain), FusedLinearReLU)
assert_type(FusedLinearGELU.from_linear(plain, approximate="none"), FusedLinearGELU)
assert_type(FusedLinear(8, 16).to_linear(), torch.nn.Linear)
convolution = FusedConv2dReLU(3, 8, 3, padding="same")
assert_type(convolution.to_unfused(), torch.nn.Module)
assert_type(tfl.conv2d_relu(image, convolution.weight, stride=2, padding=(1, 1)), torch.Tensor)

model = torch.nn.Sequential(
    FusedLinearReLU(8, 16, dtype=torch.float32, device="cpu"),
    tfl.FusedMLP(16, 32, 16, activation="gelu_tanh", device=torch.device("cpu")),
    torch.nn.Linear(16, 4),
    torch.nn.ReLU(),
)
report = tfl.fuse_(model, lambda name, module: not name.startswith("head"), memory="low")
for block in report.fused:
    assert_type(block.path, str)
tfl.unfuse_(model)
assert_type(tfl.pack_weights(torch.nn.Linear(2, 2).requires_grad_(False)), int)

with tfl.explain() as told, tfl.set_policy("auto"):
    model(x)
assert_type(told, tfl.explain)
assert_type(told.calls[0].path, str)
with tfl.plans.budget(0):
    tfl.plans.warmup(model, x)
assert_type(tfl.plans.show(), str)
assert_type(tfl.get_policy(), str)
assert_type(tfl.library_path(), str)
assert_type(tfl.__version__, str)
compiled = torch.compile(model, options=tfl.compile_options("default"))
