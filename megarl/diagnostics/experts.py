"""Metrics of how evenly the tokens of a step are spread over the experts of a model."""

from torch import Tensor


def expert_metrics(load: Tensor) -> dict[str, float]:
    """Metrics of `load` int64[layers, experts], the tokens of each expert; layers without any token have no experts.

    The imbalance of a layer is the load of its busiest expert over the mean: 1 is even, and with experts over ranks the
    others wait that much longer.
    """
    layers = load.sum(1).nonzero().flatten()
    if not len(layers):
        return {}
    loads = load[layers].double()
    imbalance = loads.amax(1) / loads.mean(1)
    return {
        "experts/imbalance_mean": float(imbalance.mean()),
        "experts/imbalance_max": float(imbalance.max()),
        "experts/idle_fraction": float((loads == 0).double().mean()),
        **{f"experts/imbalance/layer_{layer}": float(imbalance[i]) for i, layer in enumerate(layers.tolist())},
    }
