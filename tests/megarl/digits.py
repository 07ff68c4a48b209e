"""Rewards that a model which knows nothing gets at times; a file of its own, since every scoring process loads it."""


def count_digits(data_source, solution_str, ground_truth, extra_info):
    return float(sum(character.isdigit() for character in solution_str))


def begins_with_a_digit(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str[:1].isdigit())
