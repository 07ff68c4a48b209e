"""The command `megarl`: `main` finds the subcommand, and each subcommand is a file of its name."""
