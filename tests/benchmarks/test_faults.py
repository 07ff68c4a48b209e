"""The judgement of runs of which a process was killed: what is lost, twice, too old or different is found."""

import json
from itertools import product

import pytest
from faults import KINDS, PROMPTS, SCHEDULES, STEPS, Case, Outcome, cases, judged


def write_run(folder, *, metric=0.5, ordinals=None, age=0, again=(), weights=b"weights"):
    """The files of a run: batches in the order of their draws, but for those that are given."""
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface/model.safetensors").write_bytes(weights)
    notes = [
        {"step": step, "ordinals": list(range((step - 1) * PROMPTS, step * PROMPTS)), "age": 0, "tokens": 9}
        for step in range(1, STEPS + 1)
    ]
    lines = [{"step": step, "reward/mean": 0.5, "seconds/step": step * metric} for step in range(STEPS + 1)]
    notes[2] |= {"ordinals": ordinals or notes[2]["ordinals"], "age": age}
    lines[3]["reward/mean"] = metric
    (folder / "notes.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in [*again, *notes]))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return Outcome(1.0, 0, folder)


def case(schedule, kind="trainer rank", engine="transformers"):
    return Case(engine, schedule, kind, 0.5, 0)


@pytest.mark.parametrize(
    ("schedule", "made", "found"),
    [
        ("S=0", {}, []),
        # A step that was done again counts once.
        ("S=0", {"again": [{"step": 3, "ordinals": [7], "age": 0, "tokens": 1}]}, []),
        ("S=2, recompute", {"metric": 0.7, "age": 2, "weights": b"others"}, []),
        ("S=2, recompute", {"age": 3}, ["a token older than the schedule allows"]),
        ("S=2, recompute", {"ordinals": list(range(16, 23))}, ["a draw was lost, or trained on twice"]),
        ("S=2, recompute", {"ordinals": [15, *range(17, 24)]}, ["a draw was lost, or trained on twice"]),
        ("S=1, wait", {"metric": 0.75}, ["metrics differ by 5.0e-01"]),
        ("S=0", {"weights": b"others"}, ["the exported weights differ"]),
        ("S=0", {"age": 1}, ["a token older than the schedule allows", "metrics differ by inf"]),
    ],
)
def test_what_is_wrong_with_a_run_is_found(schedule, made, found, tmp_path):
    reference = write_run(tmp_path / "undisturbed")
    assert judged(case(schedule), write_run(tmp_path / "run", **made), reference) == found


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_killed_no_metric_may_be_rounded_otherwise(tmp_path, kind):
    reference, near = write_run(tmp_path / "undisturbed"), write_run(tmp_path / "run", metric=0.5 + 1e-6)
    assert judged(case("S=0", kind), near, reference) == ["metrics differ by 2.0e-06"]


def test_a_run_that_fails_hangs_or_leaves_something_is_wrong(tmp_path):
    run = write_run(tmp_path / "run")
    run.left = ["process 7"]
    assert judged(case("S=0"), run, run) == ["process 7"]
    run.code = 1
    assert judged(case("S=0"), run, run) == ["exit code 1"]
    run.code = -1
    assert judged(case("S=0"), run, run) == ["no end within 600 s"]


def test_every_kind_of_process_is_killed_under_every_schedule():
    made = cases(12, ["transformers", "vllm"], 0)
    assert {(each.kind, each.schedule) for each in made} == set(product(KINDS, SCHEDULES))
    assert {each.kind for each in made if each.engine == "vllm"} == set(KINDS) - {"controller"}
