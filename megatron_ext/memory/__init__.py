"""A rank's memory: what goes to the host for a while and comes back to where it was."""
