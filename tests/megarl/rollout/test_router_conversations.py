"""Where the requests of conversations go: scripted engines, and everything counted again from what happened."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.conversations import Conversations

MARGIN = 2


@dataclass(eq=False)
class Scripted:
    """An engine that answers when it is told to."""

    number: int
    life: int = 0
    load: int = 0

    @property
    def cache(self) -> tuple[int, int]:
        return self.number, self.life


class Played:
    """Engines, the requests that they have not answered, and where each conversation was asked last."""

    def __init__(self, engines: int) -> None:
        self.engines = [Scripted(number) for number in range(engines)]
        self.conversations = Conversations[Scripted]()
        self.unanswered: list[tuple[int | None, Scripted]] = []
        self.prefixes: dict[int, tuple[int, int]] = {}

    def active(self, engine: Scripted, but: int | None) -> int:
        names = [name for name, at in self.unanswered if at is engine]
        return len({name for name in names if name is not None and name != but}) + names.count(None)

    def ask(self, conversation: int | None, among: list[Scripted]) -> Scripted:
        chosen = self.conversations.choose(conversation, among)
        self.conversations.begin(conversation, chosen)
        self.unanswered.append((conversation, chosen))
        chosen.load += 1
        if conversation is not None:
            self.prefixes[conversation] = chosen.cache
        return chosen

    def answer(self, place: int) -> None:
        conversation, engine = self.unanswered.pop(place)
        self.conversations.end(conversation, engine)
        engine.load -= 1


asks = st.tuples(st.just("ask"), st.none() | st.integers(0, 9), st.sets(st.integers(0, 3), min_size=1))
answers = st.tuples(st.just("answer"), st.integers(0, 99), st.just(None))
losses = st.tuples(st.just("lose"), st.integers(0, 3), st.just(None))


@given(st.lists(st.one_of(asks, asks, answers, losses), max_size=60))
def test_a_conversation_stays_while_its_engine_is_not_much_busier_and_others_go_to_the_fewest(script) -> None:
    played = Played(4)
    for what, number, roomy in script:
        if what == "answer":
            if played.unanswered:
                played.answer(number % len(played.unanswered))
        elif what == "lose":
            played.engines[number].life += 1
        else:
            among = [played.engines[place] for place in sorted(roomy)]
            active = {engine: played.active(engine, number) for engine in among}
            fewest = min(active.values())
            home = [engine for engine in among if played.prefixes.get(number) == engine.cache]
            chosen = played.ask(number, among)
            assert chosen in among
            if home and active[home[0]] <= fewest + MARGIN:
                assert chosen is home[0]
            else:
                assert active[chosen] == fewest
                assert chosen.load - 1 == min(each.load - (each is chosen) for each in among if active[each] == fewest)


def test_new_conversations_are_spread_however_many_samples_they_ask_for() -> None:
    played = Played(3)
    found = [played.ask(conversation, played.engines).number for conversation in range(6)]
    assert found == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("more", "stays"), [(MARGIN, True), (MARGIN + 1, False)])
def test_a_prefix_is_worth_so_many_conversations_more_and_no_others(more: int, stays: bool) -> None:
    played = Played(2)
    home, other = played.engines
    played.ask(0, [home])
    for conversation in range(1, 4):
        played.ask(conversation, [other])
    for conversation in range(4, 4 + 3 + more):
        played.ask(conversation, [home])
    assert (played.ask(0, played.engines) is home) is stays


def test_what_an_engine_had_before_it_was_started_anew_or_given_weights_is_no_prefix() -> None:
    played = Played(2)
    home = played.ask(7, played.engines)
    played.answer(0)
    other = played.ask(8, [played.engines[1]])
    assert (home.number, other.number) == (0, 1)
    assert played.ask(8, played.engines) is other
    other.life += 1
    assert played.ask(8, played.engines) is home


def test_only_so_many_are_remembered() -> None:
    played, conversations = Played(2), 70_000
    for conversation in range(conversations):
        played.ask(conversation, played.engines)
        played.answer(0)
    remembered = [each for each in range(conversations) if each in played.conversations._caches]
    assert remembered == list(range(conversations - 65_536, conversations))
