"""Routed experts of vLLM: each token's own, whatever is computed with it or computed again."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from engine_host import PROMPTS, Served

from converters.errors import UserError
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.rollout.request_in_flight import RequestInFlight
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.vllm.cpu.routed_experts import without_argument
from megarl.rollout.vllm.sequences import SequencesInFlight, _SequenceInFlight


def test_the_experts_of_every_token_are_those_of_a_plain_forward(engines, folders, half_generated, check_experts):
    engine = engines.start(folders[0], enable_return_routed_experts=True)
    routing = ReturnedExperts.of(folders[0]).routing
    sampling = [SamplingParameters(samples=3, max_tokens=8 + 5 * place, seed=place) for place in range(len(PROMPTS))]
    requests = [Request(prompt, each) for prompt, each in zip(PROMPTS, sampling, strict=True)]
    turns = [turn for of_prompt in engine.generate(requests) for turn in of_prompt]
    assert len({tuple(turn.token_ids) for turn in turns}) > 6
    for turn in turns:
        check_experts(folders[0], turn, routing)

    # All keys and values are computed again in the middle of a response.
    served = Served(engine, folders)
    generating = half_generated(engine)
    served.update(served.first, 1)
    engine.resume()
    other = engine.generate(requests[:1])[0]
    ((whole,),) = generating.result(60)
    for turn in (whole, *other):
        check_experts(folders[0], turn, routing)

    # Whoever goes on with what was cut has the experts of all its tokens.
    cut = half_generated(engine)
    engine.pause("abort")
    ((turn,),) = cut.result(60)
    assert (turn.finish_reason, len(turn.token_ids) > 0, turn.routed_experts) == ("abort", True, ())


def test_a_response_does_not_keep_what_a_step_recorded_for_others():
    sequences = SequencesInFlight(mock.Mock(), 512, 64)
    request = RequestInFlight(Request([5], SamplingParameters(samples=2)))
    kept = sequences._sequences["0"] = _SequenceInFlight(request=request, sample=0, asked=None)
    of_step = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    output = SimpleNamespace(
        request_id="0", prefill_stats=None, new_token_ids=[], routed_experts=of_step[2:4], finish_reason=None
    )
    sequences.collect([output], 0)
    (rows,) = kept.experts
    assert rows.tolist() == of_step[2:4].tolist()
    assert rows.base is None
    assert not np.shares_memory(rows, of_step)


def test_layers_without_experts_are_left_out_of_rows(model_folder):
    returned = ReturnedExperts.of(model_folder("deepseek_v3", 0))
    assert (returned.routing.layers, returned.layers) == (1, [1])
    rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) % 4
    (records,) = returned.records([rows[:2], rows[2:]], 5)
    assert records.view(np.uint8).reshape(5, 2).tolist() == [[2, 3], [2, 3], [2, 3], [255, 255], [255, 255]]
    (nothing,) = returned.records([], 2)
    assert nothing.view(np.uint8).tolist() == [255] * 4
    with pytest.raises(RuntimeError, match="experts of 3 tokens, and fed less than 3"):
        returned.records([rows], 3)


def test_what_is_not_possible_on_a_cpu():
    given = {"enable_return_routed_experts": True, "max_model_len": 32}
    assert without_argument(given) == {"max_model_len": 32, "enable_prefix_caching": False}
    assert without_argument({"max_model_len": 32}) == {"max_model_len": 32}
    with pytest.raises(UserError, match="data_parallel_size=2 with enable_return_routed_experts needs GPUs"):
        without_argument({**given, "data_parallel_size": 2})
