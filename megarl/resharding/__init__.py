"""Moving weights while a run is on: buckets of whole HF tensors in shared memory, sources and receivers."""
