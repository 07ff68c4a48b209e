"""Settings in the form of other programs, read and translated: scripts of Megatron-LM, verl and slime."""
