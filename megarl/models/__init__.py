"""The models of a run, on disk and in their ranks: the policy and the auxiliary models."""
