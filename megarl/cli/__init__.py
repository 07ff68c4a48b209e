"""The command `megarl`: `main` dispatches subcommands, each in a file of its name; `training` has those that train."""
