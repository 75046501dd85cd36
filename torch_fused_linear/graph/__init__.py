"""The fused operators in graphs that `torch.compile` has captured."""
