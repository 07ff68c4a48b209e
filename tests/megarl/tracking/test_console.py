import io
from pathlib import Path

from rich.console import Console

from megarl.tracking import Run
from megarl.tracking.console import LiveConsole, PlainConsole, ProgressText

RUN = Run(Path("unused"), first_step=0, last_step=10)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_the_text_shows_what_is_known_so_far():
    clock = Clock()
    text = ProgressText(RUN, clock)
    assert text.update(0, {"eval/accuracy": 0.25, "policy/entropy": 1.0}) == "accuracy 0.250"
    clock.now_s += 2
    shown = text.update(1, {"reward/mean": 0.5, "throughput/tokens_per_s": 1234.4})
    assert shown == "reward 0.500  accuracy 0.250  1,234 tokens/s  18 s left"


def test_training_on_examples_shows_what_it_learns():
    text = ProgressText(RUN, Clock())
    assert text.update(1, {"sft/loss": 1.25, "sft/exact_match": 0.5}) == "loss 1.250  exact matches 0.500"
    text = ProgressText(RUN, Clock())
    found = {"preference/loss": 0.69, "preference/accuracy": 0.5, "preference/eval_accuracy": 0.75}
    assert text.update(1, found) == "loss 0.690  accuracy 0.500  held out 0.750"


def test_the_turns_of_a_step_are_said_with_the_memory_of_each():
    text = ProgressText(RUN, Clock())
    peaks = {"memory/engines": 60.5 * 2**30, "memory/trainers": 70.0 * 2**30, "memory/refit": 2**29}
    assert text.update(1, peaks) == "in turns: engines 60.50 GiB  trainers 70.00 GiB  refit 0.50 GiB"


def test_the_time_left_is_the_mean_step_of_this_run():
    clock = Clock()
    text = ProgressText(RUN, clock)
    text.update(4, {})
    for step, later_s, left in [(5, 1.0, "5 s left"), (6, 5.0, "12 s left"), (10, 6.0, "0 s left")]:
        clock.now_s += later_s
        assert text.update(step, {}) == left


def test_plain_lines_come_at_first_now_and_then_and_at_last():
    clock, out = Clock(), io.StringIO()
    logger = PlainConsole(RUN, Console(file=out, width=20), clock)
    for step in range(11):
        logger.log(step, {"reward/mean": step / 10, "throughput/tokens_per_s": 123456.0})
        clock.now_s += 2.0
    logger.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["0/10", "3/10", "6/10", "9/10", "10/10"]
    assert lines[1] == "step 3/10  reward 0.300  123,456 tokens/s  14 s left"


def test_the_live_line_is_redrawn_in_place():
    out = io.StringIO()
    logger = LiveConsole(RUN, Console(file=out, force_terminal=True, width=100), Clock())
    try:
        for step in range(4):
            logger.log(step, {"reward/mean": step / 10})
    finally:
        logger.close()
    shown = out.getvalue()
    assert "step 3/10" in shown
    assert "reward 0.300" in shown
    assert shown.count("\n") == 1
