"""Reasons for refusing arguments that several engines have, under different names."""

DRAFT = "no refit gives the draft its new weights, so that it guesses worse with every step"
MOVED_EXPERTS = "experts would move to other workers, and refits write to where they lay at the start"
OUTLIVES_WEIGHTS = "keys and values kept there outlive the weights that they were computed with"
OTHER_DISTRIBUTION = "it changes the distribution that is sampled from, of which the trainer knows nothing"
SET_BY_MEGARL = "it is set by megarl, because the rollout relies on it"
