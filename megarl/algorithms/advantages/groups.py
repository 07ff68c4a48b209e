"""Statistics of the responses to one prompt."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """N responses in G groups. Pass values [N] in float64: equal rewards then differ from their mean by exactly 0."""

    index: Tensor
    """long[N]: the group of each response, 0 to G - 1."""
    sizes: Tensor
    """long[G]"""

    @classmethod
    def of(cls, groups: Tensor) -> "Groups":
        """Build from integers [N], equal within a group and different between groups, in any order."""
        _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
        return cls(index, sizes)

    @property
    def starts(self) -> Tensor:
        """long[G]: where each group begins in `ranked`."""
        return self.sizes.cumsum(0) - self.sizes

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each group: [N] to [G]."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each group: [N] to [G]."""
        return self.sum(values) / self.sizes

    def spread(self, values: Tensor) -> Tensor:
        """Repeat the value of each group [G] for its responses: [N]."""
        return values[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Subtract the mean of the group: [N] to [N]."""
        return values - self.spread(self.mean(values))

    def std(self, values: Tensor) -> Tensor:
        """Unbiased (n - 1) standard deviation of each group: [N] to [G]; NaN for a group of one."""
        return (self.sum(self.centred(values).square()) / (self.sizes - 1)).sqrt()

    def ranked(self, values: Tensor) -> Tensor:
        """long[N]: indices of the responses, sorted by group and within a group by ascending value [N]."""
        rising = values.argsort(stable=True)
        return rising[self.index[rising].argsort(stable=True)]
