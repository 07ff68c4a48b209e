from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.rollout import make_engine


def test_an_unknown_engine_is_refused():
    with pytest.raises(UserError, match=r"rollout\.engine=tgi is not an engine: use one of vllm"):
        make_engine("tgi", Path("model"), {})
