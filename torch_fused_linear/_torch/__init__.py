"""Tensor subclasses and distributed tensors: how these parts of torch know our operators."""
