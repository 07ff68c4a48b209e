import itertools
import math

import pytest
import torch
import verl_losses as verl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.corrections import CORRECTIONS, check_correction, correction_factor, correction_metrics
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.ragged import Ragged
from megarl.schema import CorrectionConfig

# A weight or rejection of verl, with its threshold, as it is called here: kind, low, high. Its bands are of the inverse
# ratio, pi_rollout / pi_old.
WEIGHTS = {
    "token/2.0": ("token_importance", None, 2.0),
    "token/0.5_2.0": ("icepop", 0.5, 2.0),
    "sequence/2.0": ("sequence_importance", None, 2.0),
}
SEQUENCE_ICEPOP = (("sequence_importance", None, 2.0), ("sequence_band", 0.5, 2.0))
CHAINS = {**{name: (each,) for name, each in WEIGHTS.items()}, "sequence/0.5_2.0": SEQUENCE_ICEPOP}
MASKS = {
    "token_k1": ("token_band", 0.8, 1.25),
    "token_k2": ("token_square", None, 0.02),
    "token_k3": ("token_kl", None, 0.02),
    "seq_sum_k1": ("sequence_band", 1 / 1.4, 1 / 0.7),
    "seq_sum_k3": ("sequence_sum_kl", None, 0.1),
    "seq_mean_k1": ("sequence_mean_band", 1 / 1.03, 1 / 0.97),
    "seq_mean_k2": ("sequence_square", None, 0.006),
    "seq_mean_k3": ("sequence_kl", None, 0.006),
    "seq_max_k2": ("sequence_max_square", None, 0.02),
    "seq_max_k3": ("sequence_max_kl", None, 0.02),
}


def factor_of(case: verl.Case, *specifications: tuple[str, float | None, float]) -> Tensor:
    log_ratio = case.arrays["in/old_log_prob"] - case.arrays["in/rollout_log_prob"]
    return correction_factor([CorrectionConfig(*each) for each in specifications], log_ratio, case.ragged)


@pytest.mark.parametrize("case_name", verl.EVERY)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_those_of_verl(name: str, case_name: str) -> None:
    case = verl.case(case_name)
    factor = factor_of(case, WEIGHTS[name])
    verl.assert_equal(factor, case.arrays[f"correction/weights/{name}"])
    metrics = correction_metrics(factor, case.ragged).values()
    assert metrics["correction/factor_mean"] == pytest.approx(case.scalars[f"correction/mean/{name}"], rel=1e-6)
    assert metrics["correction/effective_sample_size"] == pytest.approx(
        case.scalars[f"correction/ess/{name}"], rel=1e-6
    )


@pytest.mark.parametrize("case_name", verl.EVERY)
def test_a_sequence_weight_with_a_sequence_band_is_the_icepop_of_sequences_of_verl(case_name: str) -> None:
    case = verl.case(case_name)
    factor = factor_of(case, *SEQUENCE_ICEPOP)
    verl.assert_equal(factor, case.arrays["correction/weights/sequence/0.5_2.0"])


@pytest.mark.parametrize("case_name", verl.EVERY)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_verl(name: str, case_name: str) -> None:
    case = verl.case(case_name)
    factor = factor_of(case, MASKS[name])
    assert torch.equal(factor, case.masks[f"correction/mask/{name}"].float())
    share = correction_metrics(factor, case.ragged).values()["correction/masked_tokens"]
    assert share == pytest.approx(case.scalars[f"correction/masked/{name}"], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case_name", verl.EVERY)
def test_a_weight_with_a_mask_is_verls_weight_under_its_mask(case_name: str) -> None:
    case = verl.case(case_name)
    for (weight, chain), (mask, rejection) in itertools.product(CHAINS.items(), MASKS.items()):
        kept = case.masks[f"correction/mask/{mask}"]
        verl.assert_equal(factor_of(case, *chain, rejection), case.arrays[f"correction/weights/{weight}"] * kept)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("case_name", verl.EVERY)
def test_where_we_leave_verl_weights_are_not_divided_by_their_mean(case_name: str, name: str) -> None:
    case = verl.case(case_name)
    factor = factor_of(case, *CHAINS[name])
    of_responses = case.ragged.mean(factor)[case.ragged.lengths > 0]
    mean = factor.mean() if name.startswith("token") else of_responses.mean()
    verl.assert_equal(factor / mean, case.arrays[f"correction/normalised/{name}"])


def test_the_far_case_meets_the_bounds_of_weights() -> None:
    case = verl.case(verl.FAR)
    for name in ("token/2.0", "sequence/2.0"):
        assert float((factor_of(case, WEIGHTS[name]) == 2).float().mean()) > 0.03, name
    assert float((factor_of(case, WEIGHTS["token/0.5_2.0"]) == 0).float().mean()) > 0.03


# The variants of verl's bypass_mode, whose ratios are of the present policy to the engine's.
BYPASS = {
    "is=None/rs=None": ((), ()),
    "is=token/rs=None": ((WEIGHTS["token/2.0"],), ()),
    "is=sequence/rs=seq_mean_k1": ((WEIGHTS["sequence/2.0"],), (("sequence_mean_band", 1 / 1.1, 1 / 0.9),)),
    "is=token/rs=token_k1,seq_max_k3": (
        (WEIGHTS["token/2.0"],),
        (("token_band", 0.5, 2.0), ("sequence_max_kl", None, 0.1)),
    ),
}


@pytest.mark.parametrize("variant", BYPASS)
@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip"])
@pytest.mark.parametrize("case_name", verl.NAMES)
def test_losses_corrected_to_the_engines_policy_are_those_of_verl(case_name: str, loss: str, variant: str) -> None:
    case, key = verl.case(case_name), f"bypass/{loss}/{variant}"
    log_probs = case.arrays["in/log_prob"].clone().requires_grad_()
    rollout = case.arrays["in/rollout_log_prob"]
    weights, masks = ([CorrectionConfig(*each) for each in chain] for chain in BYPASS[variant])
    kept = correction_factor(masks, log_probs - rollout, case.ragged)
    # In a clipped loss the ratio is the weight.
    name, chain = ("policy_gradient", [*weights, *masks]) if loss == "reinforce" else ("clip", masks)
    inputs = {**case.inputs(log_probs), "old_log_probs": rollout}
    token_loss = POLICY_LOSSES[name](inputs, verl.OPTIONS).loss
    # verl takes what is masked out of the denominator; here it stays there.
    terms = correction_factor(chain, log_probs - rollout, case.ragged) * token_loss / kept.sum()
    assert float((kept == 0).float().mean()) == pytest.approx(case.scalars.get(f"{key}/masked", 0.0), rel=1e-6)
    error = abs(float(terms.detach().sum()) - case.scalars[f"{key}/loss"])
    assert error <= 1e-6 * float(terms.detach().abs().sum())
    (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
    verl.assert_equal(gradient, case.arrays[f"{key}/gradient"])


def one_by_one(kind: str, row: list[float], low: float | None, high: float) -> list[float]:
    """The factors of a response of log-ratios, as the table of CORRECTIONS says them."""
    ratios = [math.exp(x) for x in row]
    k3, k2 = [math.exp(x) - 1 - x for x in row], [x * x / 2 for x in row]
    whole = {
        "sequence_importance": math.exp(sum(row)),
        "sequence_mean_importance": math.exp(sum(row) / len(row)),
        "sequence_band": math.exp(sum(row)),
        "sequence_mean_band": math.exp(sum(row) / len(row)),
        "sequence_kl": sum(k3) / len(row),
        "sequence_sum_kl": sum(k3),
        "sequence_max_kl": max(k3),
        "sequence_square": sum(k2) / len(row),
        "sequence_sum_square": sum(k2),
        "sequence_max_square": max(k2),
    }
    of_tokens = {"token_kl": k3, "token_square": k2}
    values = [whole[kind]] * len(row) if kind in whole else of_tokens.get(kind, ratios)
    lowest = -math.inf if low is None else low
    if kind.endswith("importance"):
        return [min(max(value, lowest), high) for value in values]
    return [(value if kind == "icepop" else 1.0) if lowest <= value <= high else 0.0 for value in values]


rows = st.lists(st.lists(st.floats(-2, 2), max_size=8), min_size=1, max_size=6).filter(any)


@pytest.mark.parametrize("kind", CORRECTIONS)
@given(rows, st.floats(0.01, 0.9), st.floats(0.95, 4), st.booleans())
def test_every_kind_one_response_after_the_other(kind: str, drawn, low: float, high: float, given_low: bool) -> None:
    correction = CORRECTIONS[kind]
    bound = low if correction.needs_low or (correction.takes_low and given_low) else None
    config = CorrectionConfig(kind, bound, high)
    check_correction(config)
    log_ratio = torch.tensor([x for row in drawn for x in row], dtype=torch.float64, requires_grad=True)
    factor = correction_factor([config], log_ratio, Ragged(torch.tensor([len(row) for row in drawn])))
    expected = [each for row in drawn if row for each in one_by_one(kind, row, bound, high)]
    assert factor.tolist() == pytest.approx(expected, rel=1e-9)
    assert not factor.requires_grad


@given(rows)
def test_a_chain_is_the_product(drawn) -> None:
    configs = [CorrectionConfig("token_importance", None, 1.5), CorrectionConfig("sequence_kl", None, 0.3)]
    log_ratio = torch.tensor([x for row in drawn for x in row], dtype=torch.float64)
    ragged = Ragged(torch.tensor([len(row) for row in drawn]))
    first, second = (correction_factor([config], log_ratio, ragged) for config in configs)
    torch.testing.assert_close(correction_factor(configs, log_ratio, ragged), first * second)
    assert torch.equal(correction_factor([], log_ratio, ragged), torch.ones_like(log_ratio))


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_what_is_no_number_shows(kind: str) -> None:
    config = CorrectionConfig(kind, 0.5 if CORRECTIONS[kind].takes_low else None, 2.0)
    log_ratio, ragged = torch.tensor([0.1, float("nan"), 0.1]), Ragged(torch.tensor([2, 1]))
    factor = correction_factor([config], log_ratio, ragged)
    assert bool(factor[1].isnan())
    assert not bool(factor[2].isnan())


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("log_ratio", [-300.0, 300.0])
def test_distant_log_probs_give_finite_factors(kind: str, log_ratio: float) -> None:
    config = CorrectionConfig(kind, 0.5 if CORRECTIONS[kind].takes_low else None, 2.0)
    factor = correction_factor([config], torch.tensor([log_ratio] * 3), Ragged(torch.tensor([3])))
    assert factor.isfinite().all()
    assert float(factor.max()) <= 2


def test_metrics_of_what_is_left() -> None:
    factor, ragged = torch.tensor([0.0, 0.0, 2.0, 0.0, 1.0]), Ragged(torch.tensor([2, 0, 2, 1]))
    metrics = correction_metrics(factor, ragged).values()
    assert metrics["correction/masked_tokens"] == pytest.approx(3 / 5)
    assert metrics["correction/masked_responses"] == pytest.approx(1 / 3)
    assert metrics["correction/factor_mean"] == pytest.approx(3 / 5)
    assert metrics["correction/effective_sample_size"] == pytest.approx(9 / (5 * 5))
    nothing = correction_metrics(torch.zeros(5), ragged).values()
    assert nothing["correction/effective_sample_size"] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CorrectionConfig("token_importanc", None, 2.0), r"'token_importanc' .* did you mean token_importance"),
        (CorrectionConfig("token_importance"), r"kind=token_importance needs a bound `high`"),
        (CorrectionConfig("icepop", None, 2.0), r"kind=icepop needs a bound `low`"),
        (CorrectionConfig("sequence_kl", 0.1, 2.0), r"kind=sequence_kl has no lower bound, but low=0.1"),
        (CorrectionConfig("token_band", 3.0, 2.0), r"low=3.0 and high=2.0: they must satisfy"),
        (CorrectionConfig("token_band", -1.0, 2.0), r"low=-1.0 and high=2.0: they must satisfy"),
        (CorrectionConfig("sequence_kl", None, 0.0), r"high=0.0: they must satisfy"),
        (CorrectionConfig("sequence_kl", None, float("nan")), r"high=nan: they must satisfy"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(config: CorrectionConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_correction(config)
