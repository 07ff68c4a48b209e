"""What people watch while a policy learns: trajectories and batches as metrics, and warnings from these."""
