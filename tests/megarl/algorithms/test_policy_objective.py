import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import POLICY_LOSSES, Metrics, PolicyObjective
from megarl.schema import AlgorithmConfig, CorrectionConfig
from megatron_ext.log_probs import linear_log_probs
from megatron_ext.packing.packing import RaggedBatch, pack

OBJECTIVE = PolicyObjective(
    AlgorithmConfig(
        policy_loss_options={"clip_low": 0.1, "clip_high": 0.2}, kl_coefficient=0.3, entropy_coefficient=0.05
    )
)
VOCABULARY = 11


def random_batch(shapes: list[tuple[int, int]], seed: int) -> tuple[RaggedBatch, Tensor]:
    """Sequences of (prompt, response) lengths with all fields in float64, and a table of next-token logits."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(prompt + response for prompt, response in shapes)
    responses = torch.cat([torch.tensor([0] * prompt + [1] * response) for prompt, response in shapes])
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    tokens = torch.randint(VOCABULARY, (total,), generator=generator)
    near = torch.log_softmax(table, -1)[tokens.roll(1), tokens].double()

    def noisy() -> Tensor:
        return near + 0.2 * torch.randn(total, generator=generator).double()

    fields = {
        "weights": responses.double() / responses.sum(),
        "advantages": torch.randn(total, generator=generator).double(),
        "old_log_probs": noisy(),
        "reference_log_probs": noisy(),
        "rollout_log_probs": noisy(),
    }
    return RaggedBatch(tokens, torch.tensor([prompt + response for prompt, response in shapes]), fields), table


def run(batch: RaggedBatch, table: Tensor, split: list[list[int]], objective: PolicyObjective = OBJECTIVE):
    """Loss, gradient and metrics of a bigram model over the micro-batches of `split`."""
    table = table.clone().requires_grad_()
    pieces = []
    for sequences in split:
        micro_batch = pack(batch, sequences, align=2)
        logits, identity = table[micro_batch.tokens[0]], torch.eye(table.shape[1])
        predictions = linear_log_probs(logits, identity, micro_batch.labels[0], None)
        loss, metrics = objective(predictions, micro_batch)
        loss.backward()
        pieces.append(metrics)
    assert table.grad is not None
    return table.grad, Metrics.merge(pieces)


def by_the_formula(batch: RaggedBatch, table: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The same, in float64, one token after the other."""
    table = table.double().requires_grad_()
    log_p = torch.log_softmax(table, dim=-1)
    fields, losses, kl_to_old, clipped, differences, ratios = batch.fields, [], 0.0, 0.0, [], []
    for position, weight in enumerate(fields["weights"].tolist()):
        if weight == 0:
            continue
        row = log_p[batch.tokens[position - 1]]
        new, old = row[batch.tokens[position]], fields["old_log_probs"][position]
        advantage, ratio = fields["advantages"][position], (new - old).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.9, 1.2) * advantage)
        d = fields["reference_log_probs"][position] - new
        losses.append(weight * (policy + 0.3 * (d.exp() - 1 - d) + 0.05 * (row.exp() * row).sum()))
        kl_to_old += weight * float(ratio - 1 - (new - old))
        clipped += weight * bool((advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.9))
        ratios.append(float(ratio))
        differences.append(abs(float(old - fields["rollout_log_probs"][position])))
    loss = torch.stack(losses).sum()
    loss.backward()
    expected = {
        "policy/loss": loss.item(),
        "policy/kl_to_old": kl_to_old,
        "policy/clip_fraction": clipped,
        "policy/ratio_mean": sum(ratios) / len(ratios),
        "policy/ratio_max": max(ratios),
        "log_prob_difference/mean": sum(differences) / len(differences),
        "log_prob_difference/max": max(differences),
    }
    assert table.grad is not None
    return loss.detach(), table.grad, expected


shapes_of_sequences = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=6)


@given(shapes_of_sequences, st.integers(0, 100))
def test_loss_gradient_and_metrics_are_those_of_the_formula(shapes, seed) -> None:
    batch, table = random_batch(shapes, seed)
    gradient, metrics = run(batch, table, [list(range(len(batch)))])
    _, expected_gradient, expected = by_the_formula(batch, table)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-6)
    actual = metrics.values()
    for name, value in expected.items():
        assert float(actual[name]) == pytest.approx(value, rel=1e-4, abs=1e-6), name


@given(shapes_of_sequences, st.integers(0, 100), st.data())
def test_no_cut_into_micro_batches_changes_anything(shapes, seed, data) -> None:
    batch, table = random_batch(shapes, seed)
    place = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    split = [[index for index, chosen in enumerate(place) if chosen == number] for number in range(4)]
    whole_gradient, whole = run(batch, table, [list(range(len(batch)))])
    gradient, metrics = run(batch, table, split)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-6)
    assert metrics.maxima == whole.maxima
    for name, value in whole.values().items():
        assert metrics.values()[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_values_outside_the_responses_do_not_enter() -> None:
    batch, table = random_batch([(3, 2), (1, 4)], 0)
    clean_gradient, clean = run(batch, table, [[0, 1]])
    outside = batch.fields["weights"] == 0
    poisoned = {
        name: values.masked_fill(outside, float("nan")) for name, values in batch.fields.items() if name != "weights"
    }
    gradient, metrics = run(batch.with_fields(**poisoned), table, [[0, 1]])
    assert torch.equal(gradient, clean_gradient)
    assert metrics.values() == clean.values()


def test_a_value_that_is_no_number_inside_a_response_shows() -> None:
    batch, table = random_batch([(1, 4)], 0)
    advantages = batch.fields["advantages"].clone()
    advantages[2] = float("nan")
    _, metrics = run(batch.with_fields(advantages=advantages), table, [[0]])
    assert metrics.sums["policy/loss"].isnan()


def test_without_old_log_probs_the_present_policy_is_the_old_one() -> None:
    batch, table = random_batch([(2, 3)], 0)
    fields = {name: values for name, values in batch.fields.items() if name != "old_log_probs"}
    gradient, metrics = run(RaggedBatch(batch.tokens, batch.lengths, fields), table, [[0]], PolicyObjective())
    assert metrics.values()["policy/kl_to_old"] == 0
    assert metrics.values()["policy/ratio_max"] == 1
    table = table.clone().requires_grad_()
    log_p = torch.log_softmax(table, -1)[batch.tokens[:-1], batch.tokens[1:]]
    (-(fields["weights"] * fields["advantages"])[1:] * log_p).sum().backward()
    torch.testing.assert_close(gradient, table.grad, rtol=1e-5, atol=1e-6)


def test_the_reference_is_read_only_with_a_coefficient() -> None:
    batch, table = random_batch([(2, 3)], 0)
    fields = {name: values for name, values in batch.fields.items() if name != "reference_log_probs"}
    batch = RaggedBatch(batch.tokens, batch.lengths, fields)
    _, metrics = run(batch, table, [[0]], PolicyObjective())
    assert "policy/kl_to_reference" not in metrics.values()
    with pytest.raises(KeyError, match="reference_log_probs"):
        run(batch, table, [[0]], PolicyObjective(AlgorithmConfig(kl_coefficient=0.1)))


def test_a_kl_in_the_reward_is_reported_and_not_in_the_loss() -> None:
    batch, table = random_batch([(2, 3)], 0)
    plain_gradient, plain = run(batch, table, [[0]], PolicyObjective())
    gradient, metrics = run(
        batch, table, [[0]], PolicyObjective(AlgorithmConfig(kl_coefficient=0.5, kl_in="reward", kl_estimator="k1"))
    )
    assert torch.equal(gradient, plain_gradient)
    assert metrics.values()["policy/loss"] == plain.values()["policy/loss"]
    assert metrics.values()["policy/kl_to_reference"] != 0


def test_the_factor_of_the_corrections_is_on_the_policy_loss_alone() -> None:
    batch, table = random_batch([(2, 3), (1, 4)], 1)
    terms = {"kl_coefficient": 0.3, "entropy_coefficient": 0.05}
    nothing_left = [CorrectionConfig("sequence_sum_kl", None, 1e-12)]
    gradient, metrics = run(batch, table, [[0, 1]], PolicyObjective(AlgorithmConfig(**terms, corrections=nothing_left)))
    without = batch.with_fields(advantages=torch.zeros_like(batch.fields["advantages"]))
    expected, _ = run(without, table, [[0, 1]], PolicyObjective(AlgorithmConfig(**terms)))
    torch.testing.assert_close(gradient, expected)
    assert metrics.values()["correction/masked_responses"] == 1

    doubled = [CorrectionConfig("token_importance", 2.0, 2.0)]
    gradient, metrics = run(batch, table, [[0, 1]], PolicyObjective(AlgorithmConfig(corrections=doubled)))
    single, _ = run(batch, table, [[0, 1]], PolicyObjective())
    torch.testing.assert_close(gradient, 2 * single)
    assert metrics.values()["correction/factor_mean"] == 2


def test_the_ratio_that_is_corrected_is_of_the_present_policy_without_old_log_probs() -> None:
    batch, table = random_batch([(2, 3)], 0)
    near = torch.log_softmax(table, -1)[batch.tokens.roll(1), batch.tokens].double()
    explicit = batch.with_fields(old_log_probs=near)
    bare = RaggedBatch(batch.tokens, batch.lengths, {k: v for k, v in batch.fields.items() if k != "old_log_probs"})
    objective = PolicyObjective(AlgorithmConfig(corrections=[CorrectionConfig("token_importance", None, 1.05)]))
    expected, expected_metrics = run(explicit, table, [[0]], objective)
    gradient, metrics = run(bare, table, [[0]], objective)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    trained = batch.fields["weights"] != 0
    ratios = (near - batch.fields["rollout_log_probs"])[trained].exp()
    mean = float(ratios.clamp(max=1.05).mean())
    assert expected_metrics.values()["correction/factor_mean"] == pytest.approx(mean, rel=1e-6)
    assert metrics.values()["correction/factor_mean"] == pytest.approx(mean, rel=1e-6)


def test_it_travels_between_processes_and_its_kl_adapts() -> None:
    config = AlgorithmConfig(
        policy_loss_options={"clip_high": 0.3}, corrections=[CorrectionConfig("token_importance", high=2.0)]
    )
    objective = PolicyObjective(config)
    assert pickle.loads(pickle.dumps(objective)) == objective
    assert objective.with_kl_coefficient(0.5) == PolicyObjective(replace(config, kl_coefficient=0.5))
    assert config.kl_coefficient == 0


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (AlgorithmConfig(), False),
        (AlgorithmConfig(kl_coefficient=0.1), True),
        (AlgorithmConfig(kl_coefficient=0.1, kl_in="reward"), True),
        (AlgorithmConfig(policy_loss="sppo", aggregation="seq_mean_token_mean"), True),
    ],
)
def test_it_says_whether_a_reference_has_to_be_kept(config: AlgorithmConfig, needed: bool) -> None:
    assert PolicyObjective(config).needs_reference == needed


def test_it_says_whether_tokens_have_to_be_chosen() -> None:
    config = AlgorithmConfig(aggregation="seq_mean_token_mean")
    needing = {name for name in POLICY_LOSSES if PolicyObjective(replace(config, policy_loss=name)).needs_selection}
    assert needing == {"clip_cov", "kl_cov"}
