"""The process that a command is: its signals, its phases, and what ends it from outside."""
