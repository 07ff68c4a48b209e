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
TOLD = 4
"""Tokens of each sample that it tells of, each time it is asked."""


def response(draw, sample, greedy):
    """All tokens of a sample."""
    length = 16 + (draw + 3 * sample) % 5
    return [3 + (7 * draw + 5 * sample + 3 * greedy + place) % 10 for place in range(length)]


def log_prob(place, version):
    """The log-prob of the token in a place, by weights of a version."""
    return np.float32(-0.01 * (place + 1) - version)


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
        for asked in requests.items():
            self._asked.put(asked)

    def events(self):
        while (asked := self._asked.get()) is not None:
            number, request = asked
            is_due = request.prompt_token_ids[0] // PROMPTS <= self._version
            yield [Event(number, self._ends(request))] if is_due else [self._progress(number, request)]

    def begin_update(self, version, names):
        pass

    def commit_update(self, version, kv):
        self._version = version
        return 0

    def close(self):
        self._asked.put(None)

    def _ends(self, request):
        return [
            Turn.of(request.prompt_of(sample), new.tokens, new.log_probs, new.versions, "stop")
            for sample in request.samples
            for new in [self._new(request, sample, None)]
        ]

    def _progress(self, number, request):
        news = [self._new(request, sample, TOLD) for sample in request.samples]
        count = len(news)
        whose = np.full(count, number, np.int32), np.array(request.samples, np.int32), np.full(count, TOLD, np.int32)
        return Progress(*whose, *(np.concatenate([getattr(new, name) for new in news]) for name in vars(news[0])))

    def _new(self, request, sample, count):
        """The next tokens of a sample, so many or all."""
        begun = len(request.begun_of(sample))
        tokens = response(request.prompt_token_ids[0], sample, request.sampling.temperature == 0)
        assert tokens[:begun] == list(request.begun_of(sample))
        places = range(len(tokens))[begun:][:count]
        return SimpleNamespace(
            tokens=np.array([tokens[place] for place in places], np.int32),
            log_probs=np.array([log_prob(place, self._version) for place in places], np.float32),
            versions=np.full(len(places), self._version, np.int32),
        )
