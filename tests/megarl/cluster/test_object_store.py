"""How large the object store of a run on one machine is: as the key says, or by what the machine has."""

import re

import pytest
import ray

from converters.errors import UserError
from megarl.cluster.ray.object_store import store_bytes
from megarl.cluster.ray.runtime import ray_cluster
from megarl.schema import ClusterConfig

MIB, GIB = 1024**2, 1024**3


def test_the_store_of_a_local_run_is_as_large_as_the_key_says() -> None:
    with ray_cluster(ClusterConfig(object_store_bytes=123 * MIB)):
        assert ray.cluster_resources()["object_store_memory"] == 123 * MIB


@pytest.mark.parametrize(
    ("memory", "shared", "expected"),
    [
        (100 * GIB, 100 * GIB, 30 * GIB),
        (100 * GIB, 20 * GIB, 10 * GIB),
        (1000 * GIB, 1000 * GIB, 200 * 10**9),
        (100 * GIB, 64 * MIB, 256 * MIB),
        (GIB // 2, 100 * GIB, 256 * MIB),
    ],
)
def test_without_a_key_it_is_a_part_of_what_is_free(memory: int, shared: int, expected: int) -> None:
    assert store_bytes(None, memory, shared) == expected


def test_a_store_that_fits_is_as_large_as_was_asked() -> None:
    assert store_bytes(50 * GIB, 100 * GIB, 50 * GIB) == 50 * GIB


@pytest.mark.parametrize(("memory", "shared"), [(100 * GIB, 64 * MIB), (GIB, 100 * GIB)])
def test_more_than_the_machine_has_is_refused_with_what_it_has(memory: int, shared: int) -> None:
    says = (
        f"cluster.object_store_bytes={GIB} is more than there is room for: /dev/shm has {shared} bytes free, and "
        f"{memory} of memory are available, of which Ray wants 100000000 for the rest; lower it"
    )
    with pytest.raises(UserError, match=re.escape(says)):
        store_bytes(GIB, memory, shared)
