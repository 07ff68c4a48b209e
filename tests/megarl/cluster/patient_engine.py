"""An engine that goes by a script: it ends responses of the batch that is due, and tells some tokens of others.

It says of each token with which weights it was sampled: by the version, and by a log-prob that only these give.
"""

from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
from echo_engine import check_that_the_trainer_has_nothing, pass_by

from megarl.data import Turn
from megarl.rollout.protocol import Progress, RequestEnded

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


def is_due(request, version):
    return request.prompt_token_ids[0] // PROMPTS <= version


class PatientEngine:
    told = TOLD

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
            answer = self._ends if is_due(request, self._version) else self._progress
            self._asked.put(partial(answer, number, request, self._version))

    def events(self, engines):
        while (answer := self._asked.get()) is not None:
            yield [answer()]

    def begin_update(self, version, names):
        pass

    def commit_update(self, version, kv):
        self._version = version
        return 0

    def close(self):
        self._asked.put(None)

    def _ends(self, number, request, version):
        return self._event(number, request, version, None, "stop")

    def _event(self, number, request, version, count, reason):
        turns = [
            Turn.of(request.prompt_of(sample), new.tokens, new.log_probs, new.versions, reason)
            for sample in request.samples
            for new in [self._new(request, sample, version, count)]
        ]
        return RequestEnded(number, turns)

    def _progress(self, number, request, version):
        news = [self._new(request, sample, version, self.told) for sample in request.samples]
        count, told = len(news), self.told
        whose = np.full(count, number, np.int32), np.array(request.samples, np.int32), np.full(count, told, np.int32)
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

    def load(self):
        return None

    def commit_update(self, version, kv):
        super().commit_update(version, kv)
        due = [number for number, each in self._left.items() if is_due(each, version)]
        super().submit({number: self._left.pop(number) for number in due})
        return 0


class NappingEngine(PatientEngine):
    """One that sleeps in between, cut behind what it has told of, and dies where a script says so (`echo_engine`)."""

    told = 2

    def __init__(self, model_path, arguments):
        super().__init__(model_path, arguments)
        self._version, self._left = arguments["version"], {}

    def start(self):
        check_that_the_trainer_has_nothing()

    def version(self):
        pass_by("version")
        return super().version()

    def submit(self, requests):
        self._left |= {number: each for number, each in requests.items() if not is_due(each, self._version)}
        # It tells of those that go on before it ends one, and may die.
        super().submit(dict(sorted(requests.items(), key=lambda each: is_due(each[1], self._version))))

    def sleep(self):
        for number, request in self._left.items():
            self._asked.put(partial(self._event, number, request, self._version, self.told, "abort"))
        self._left.clear()

    def wake_up(self, parts):
        pass

    def commit_update(self, version, kv):
        pass_by("commit_update")
        return super().commit_update(version, kv)

    def close(self):
        pass_by("close")
        super().close()

    def _ends(self, number, request, version):
        pass_by("generate")
        return super()._ends(number, request, version)
