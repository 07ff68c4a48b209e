"""The Ray cluster of a run: on this machine only, on the nodes of a Slurm job, or an existing one."""
