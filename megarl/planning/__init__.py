"""Traffic and time of a refit, predicted from sizes alone: cluster, ports, prediction, replay, picture."""
