"""What a refit will move and how long that takes, from sizes alone: cluster, ports, prediction, replay, picture."""
