"""Weights from Megatron's ranks to engines: `direct` into their parameters, or by `loader`, tensor by tensor."""
