"""Cost of a plan: the bytes that every rank and port moves, how long that takes, and how long it must take."""

from converters.cost.counting import traffic
from converters.cost.formats import TensorFormat, formats
from converters.cost.ports import Port, Ports, Rates, busiest_port, lower_bounds
from converters.cost.traffic_matrix import Traffic

__all__ = [
    "Port",
    "Ports",
    "Rates",
    "TensorFormat",
    "Traffic",
    "busiest_port",
    "formats",
    "lower_bounds",
    "traffic",
]
