"""The machine megarl runs on: what is there, and what follows from it."""
