"""Events of an engine about a request that was submitted."""

from itertools import chain, takewhile

from megarl.rollout.protocol import Engine, Progress, RequestEnded, SamplesEnded


def progress_behind_ends(engine: Engine, number: int, count: int) -> list[Progress]:
    """Progress that an engine tells of when so many samples of a request have ended, and before the request ends."""
    events = chain.from_iterable(engine.events())
    told = list(takewhile(lambda event: not isinstance(event, RequestEnded), events))
    ends = [
        place
        for place, event in enumerate(told)
        if isinstance(event, SamplesEnded)
        for each in event.numbers
        if each == number
    ]
    assert len(ends) == count
    return [each for each in told[ends[-1] :] if isinstance(each, Progress)]
