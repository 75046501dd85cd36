"""docs/start.md as a script: `python docs/start.py`."""

import torch
from torch import nn

import torch_fused_linear as tfl

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 256, device=device)
plain = nn.Linear(256, 512, device=device)
fused = tfl.FusedLinearReLU.from_linear(plain)  # shares its parameters
torch.testing.assert_close(fused(x), plain(x).relu())

gelu = tfl.FusedLinearGELU.from_linear(plain, approximate="none")
torch.testing.assert_close(gelu(x), nn.functional.gelu(plain(x)))

model = tfl.FusedMLP(256, 512, 10, device=device)  # Linear, ReLU, Linear
with tfl.explain() as report:
    model(x).sum().backward()
print(report)  # a row for each operator: what ran, and why
assert "_linear_backward_across" in [call.operator for call in report.calls]

encoder = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, device=device)
tokens = torch.randn(2, 10, 64, device=device)
before = encoder(tokens)
print(tfl.fuse_(encoder))  # 1 block fused, 0 places left alone ...
torch.testing.assert_close(encoder(tokens), before)

tfl.plans.warmup(model, x)
print(tfl.plans.show() or "on a CPU nothing is measured")
