import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.data import PromptSampler
from megarl.data.sampler import digest_of

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)
draws = st.lists(st.integers(0, 100), max_size=8)


@given(sizes, seeds, draws, st.booleans())
def test_every_epoch_draws_every_prompt_once(size, seed, counts, shuffle):
    sampler = PromptSampler(size, shuffle, seed)
    drawn = [index for count in counts for index in sampler.next(count)]
    assert len(drawn) == sum(counts)
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start : start + size]) == list(range(size))
    assert sampler.epoch == len(drawn) // size


@given(sizes, seeds, draws, draws)
def test_a_resumed_sampler_goes_on_where_the_saved_one_stopped(size, seed, before, after):
    sampler = PromptSampler(size, True, seed)
    for count in before:
        sampler.next(count)
    resumed = PromptSampler(size, True, seed)
    resumed.load_state_dict(sampler.state_dict())
    assert [resumed.next(count) for count in after] == [sampler.next(count) for count in after]


@given(sizes, seeds, st.integers(0, 100))
def test_how_the_draws_are_cut_changes_nothing(size, seed, count):
    at_once, one_by_one = PromptSampler(size, True, seed), PromptSampler(size, True, seed)
    assert at_once.next(count) == [index for _ in range(count) for index in one_by_one.next(1)]


@given(sizes, seeds, draws, st.integers(0, 30))
def test_draws_are_numbered_for_the_whole_run_also_after_it_was_resumed(size, seed, counts, more):
    sampler, plain = PromptSampler(size, True, seed), PromptSampler(size, True, seed)
    numbered = [each for count in counts for each in sampler.draw(count)]
    resumed = PromptSampler(size, True, seed)
    resumed.load_state_dict(sampler.state_dict())
    numbered += resumed.draw(more)
    assert numbered == list(enumerate(plain.next(sum(counts) + more)))
    assert resumed.drawn == len(numbered)


def test_epochs_and_seeds_differ_when_shuffled():
    sampler = PromptSampler(100, True, 1)
    first, second = sampler.next(100), sampler.next(100)
    assert first != second
    assert first != PromptSampler(100, True, 2).next(100)
    assert first == PromptSampler(100, True, 1).next(100)


def test_unshuffled_is_the_order_of_the_files():
    assert PromptSampler(3, False, 5).next(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (PromptSampler(11, True, 0), "size=11"),
        (PromptSampler(10, False, 0), "shuffle=False"),
        (PromptSampler(10, True, 3), "seed=3"),
    ],
)
def test_the_state_of_another_order_is_refused(other, said):
    with pytest.raises(UserError, match=said):
        PromptSampler(10, True, 0).load_state_dict(other.state_dict())


def test_a_run_goes_on_with_the_same_prompts_alone():
    digest = digest_of([[1, 2], [3]])
    assert digest != digest_of([[1], [2, 3]])
    assert digest != digest_of([[3], [1, 2]])
    sampler = PromptSampler(2, True, 0, digest)
    sampler.next(1)
    PromptSampler(2, True, 0, digest_of([[1, 2], [3]])).load_state_dict(sampler.state_dict())
    with pytest.raises(UserError, match="examples are not those of this run"):
        PromptSampler(2, True, 0, digest_of([[1, 2], [4]])).load_state_dict(sampler.state_dict())


def test_draws_of_the_epoch_before_are_found_without_ordering_it_anew_for_each(monkeypatch):
    sampler = PromptSampler(100, True, 1)
    expected = [*sampler.next(100), *sampler.next(50)]
    make, made = np.random.default_rng, []

    def counted(seed):
        made.append(seed)
        return make(seed)

    monkeypatch.setattr(np.random, "default_rng", counted)
    found = {ordinal: sampler.index_of(ordinal) for half in range(50) for ordinal in (half, 50 + half, 100 + half)}
    assert [found[ordinal] for ordinal in range(150)] == expected
    assert made == [(1, 0)]
