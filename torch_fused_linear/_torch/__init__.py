"""What makes parts of torch know our operators: tensor subclasses, distributed tensors."""
