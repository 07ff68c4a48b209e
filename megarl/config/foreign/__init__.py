"""Reads and translates settings in the form of other programs: scripts of Megatron-LM, verl and slime."""
