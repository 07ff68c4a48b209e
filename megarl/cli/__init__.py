"""The command `megarl`: `main` finds the subcommand. Each is a file of its name, those that train in `training`."""
