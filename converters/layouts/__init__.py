"""How a model lies in the tensors of each kind of holder."""
