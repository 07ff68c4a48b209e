"""The Ray cluster of a run: this machine alone, nodes of a Slurm job, or one that is already there."""
