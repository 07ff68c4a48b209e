import pytest

from converters.errors import UserError
from megarl.algorithms.parts import lookup


def test_a_known_name_gives_its_function() -> None:
    assert lookup({"clip": len}, "algorithm.policy_loss", "clip") is len


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"^algorithm\.policy_loss='klip' is not known; did you mean clip\?"):
        lookup({"clip": len, "gspo": len}, "algorithm.policy_loss", "klip")
    with pytest.raises(UserError, match=r"'xyz' is not known; it must be one of clip, gspo$"):
        lookup({"clip": len, "gspo": len}, "algorithm.policy_loss", "xyz")
