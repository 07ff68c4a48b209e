"""A cluster of our own that does not come up."""

from pathlib import Path

import pytest
import ray
from ray._private import node

from megarl.cluster.runtime import _TIMED_OUT, RayNotStarted, ray_cluster
from megarl.schema import ClusterConfig

OF_RAY = "The current node timed out during startup. This could happen because the raylet failed to startup"


@pytest.mark.parametrize(("says", "raised"), [(OF_RAY, RayNotStarted), ("port 7 is taken", Exception)])
def test_only_its_time_out_is_said_in_a_sentence(monkeypatch, says, raised):
    def never_up(**_):
        raise Exception(says)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", never_up)
    with pytest.raises(raised, match="") as found, ray_cluster(ClusterConfig()):
        pass
    assert type(found.value) is raised


def test_the_words_are_those_of_ray():
    assert _TIMED_OUT in Path(node.__file__).read_text()
