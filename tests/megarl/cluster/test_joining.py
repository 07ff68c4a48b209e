import pytest

from converters.errors import UserError
from megarl.cluster.joining import join, machines


def node(address, *, alive=True, **resources):
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def test_machines_that_can_hold_a_process_are_counted():
    controller, dead = node("10.0.0.1", memory=4.0), node("10.0.0.2", alive=False, CPU=96.0)
    first, second = node("10.0.0.3", CPU=96.0, GPU=8.0), node("10.0.0.4", CPU=96.0)
    assert machines([second, controller, dead, first]) == [first, second]


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "ray://head:10001"])
def test_what_is_no_address_is_said(address):
    with pytest.raises(UserError, match=f"^cluster.address={address} is no address: give host:port, or auto on "):
        join(address)
