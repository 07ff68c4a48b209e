"""Moves weights from Megatron's ranks to engines: `direct` into their parameters, `loader` through their own loader."""
