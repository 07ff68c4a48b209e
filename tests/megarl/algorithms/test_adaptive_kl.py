import pytest
import verl_losses as verl
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.algorithms import AdaptiveKl
from megarl.schema import AlgorithmConfig


def adaptive() -> AdaptiveKl:
    return AdaptiveKl.from_config(AlgorithmConfig(kl_coefficient=0.001, kl_target=0.1, kl_horizon=10000))


def test_the_coefficients_of_verl() -> None:
    controller, coefficients = adaptive(), []
    for kl in (0.05, 0.2, 0.11, 0.0, 5.0):
        controller.update(kl, 256)
        coefficients.append(controller.coefficient)
    assert coefficients == pytest.approx(verl.case("plain").arrays["adaptive_kl"].tolist(), rel=1e-6)


@pytest.mark.parametrize(("responses", "factor"), [(5000, 0.9), (10_000, 0.8), (50_000, 0.8), (60_000, 0.8)])
def test_a_step_of_many_responses_changes_the_coefficient_by_a_fifth(responses: int, factor: float) -> None:
    """Five horizons in one step would take it to 0, six below, where every run would end."""
    below, above = adaptive(), adaptive()
    below.update(0.0, responses)
    above.update(5.0, responses)
    assert (below.coefficient, above.coefficient) == pytest.approx((0.001 * factor, 0.001 * (2 - factor)))


@given(st.floats(0, 10), st.integers(1, 1000))
def test_a_fixed_coefficient_stays(kl: float, responses: int) -> None:
    controller = AdaptiveKl.from_config(AlgorithmConfig(kl_coefficient=0.3))
    controller.update(kl, responses)
    controller.load_state_dict({"coefficient": 7.0})
    assert controller.coefficient == 0.3


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    straight, stopped = adaptive(), adaptive()
    straight.update(0.3, 100)
    stopped.update(0.3, 100)
    resumed = adaptive()
    resumed.load_state_dict(stopped.state_dict())
    straight.update(0.01, 100)
    resumed.update(0.01, 100)
    assert resumed.coefficient == straight.coefficient != 0.001


def test_a_run_that_begins_to_adapt_when_it_resumes_begins_with_its_own_coefficient() -> None:
    resumed = adaptive()
    resumed.load_state_dict(AdaptiveKl.from_config(AlgorithmConfig(kl_coefficient=0.0)).state_dict())
    assert resumed.coefficient == 0.001


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_a_kl_that_is_no_number_is_refused(kl: float) -> None:
    with pytest.raises(UserError, match=r"the KL to the reference is (nan|inf)"):
        adaptive().update(kl, 1)
