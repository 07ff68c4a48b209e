"""An engine that goes by a script: it ends responses of the batch that is due, and tells some tokens of others.

It says of each token with which weights it was sampled: by the version, and by a log-prob that only these give.
"""

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np

from megarl.data import Turn
from megarl.rollout.protocol import Event, Progress

PROMPTS = 2
"""Draws of a batch: the first token of a prompt is its draw."""
FORGOTTEN = 23
"""Tokens that it says to compute again as all that it had computed is forgotten."""
TOLD = 4
"""Tokens of each sample that it tells of, each time it is asked."""


def response(draw, sample, greedy):
    """All tokens of a sample."""
    length = 16 + (draw + 3 * sample) % 5
    return [3 + (7 * draw + 5 * sample + 3 * greedy + place) % 10 for place in range(length)]


def log_prob(place, version):
    """The log-prob of the token in a place, by weights of a version."""
    return np.float32(-0.01 * (place + 1) - version)


def is_due(request, version):
    return request.prompt_token_ids[0] // PROMPTS <= version


class PatientEngine:
    def __init__(self, model_path, arguments):
        self._version, self._asked = 0, SimpleQueue()

    def start(self):
        pass

    def version(self):
        return self._version

    def worker_parts(self):
        return [0]

    def submit(self, requests):
        # The weights of now, however long a busy machine takes to listen.
        for number, request in requests.items():
            self._asked.put((number, request, self._version))

    def events(self):
        while (asked := self._asked.get()) is not None:
            _, request, version = asked
            yield [self._ends(*asked) if is_due(request, version) else self._progress(*asked)]

    def begin_update(self, version, names):
        pass

    def commit_update(self, version, kv):
        self._version = version
        return 0

    def close(self):
        self._asked.put(None)

    def _ends(self, number, request, version):
        turns = [
            Turn.of(request.prompt_of(sample), new.tokens, new.log_probs, new.versions, "stop")
            for sample in request.samples
            for new in [self._new(request, sample, version, None)]
        ]
        return Event(number, turns)

    def _progress(self, number, request, version):
        news = [self._new(request, sample, version, TOLD) for sample in request.samples]
        count = len(news)
        whose = np.full(count, number, np.int32), np.array(request.samples, np.int32), np.full(count, TOLD, np.int32)
        return Progress(*whose, *(np.concatenate([getattr(new, name) for new in news]) for name in vars(news[0])))

    def _new(self, request, sample, version, count):
        """The next tokens of a sample, so many or all."""
        begun = len(request.begun_of(sample))
        tokens = response(request.prompt_token_ids[0], sample, request.sampling.temperature == 0)
        assert tokens[:begun] == list(request.begun_of(sample))
        places = range(len(tokens))[begun:][:count]
        return SimpleNamespace(
            tokens=np.array([tokens[place] for place in places], np.int32),
            log_probs=np.array([log_prob(place, version) for place in places], np.float32),
            versions=np.full(len(places), version, np.int32),
        )


class LastingEngine(PatientEngine):
    """One that also ends what it was asked for earlier, with the weights with which that is due, unless it is lost."""

    def __init__(self, model_path, arguments):
        super().__init__(model_path, arguments)
        self._left = {}

    def submit(self, requests):
        self._left |= {number: each for number, each in requests.items() if not is_due(each, self._version)}
        super().submit(requests)

    def abort(self, numbers):
        for number in numbers:
            self._left.pop(number, None)

    def reset_prefix_cache(self):
        return FORGOTTEN

    def load(self):
        return None

    def commit_update(self, version, kv):
        super().commit_update(version, kv)
        due = [number for number, each in self._left.items() if is_due(each, version)]
        super().submit({number: self._left.pop(number) for number in due})
        return 0
