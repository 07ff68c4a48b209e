"""Brings new weights into the engines: both paths, the choice between them, the start, and checks."""
