"""The process that runs a command: its signals and phases, and what ends it from outside."""
