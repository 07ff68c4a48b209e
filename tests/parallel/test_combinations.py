"""Every layout of every kind of model gives what one process gives; with `--page` a page of it is written."""

from collections.abc import Callable, Mapping

import pytest
import table
from combinations import KINDS, PROCESSES, Layout, layouts
from launch import run_ranks
from reference import write_model
from run import ModelKey, Reference, compare, references

from converters.layouts.megatron import ParallelSizes

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(7200)]


LAYOUTS_OF_A_LAUNCH = 30


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Mapping[str, list[Layout]]:
    """The layouts of each kind of model that are asked for: of all numbers of processes and kinds of parallelism.

    A sample is one of the layouts of all kinds in a row, so that kinds differ in the layouts that are in it.
    """
    sample, offset, missing = (request.config.getoption(name) for name in ("--sample", "--offset", "--missing"))
    there = table.read(table.PAGE.read_text()) if missing else {}
    every = [(kind, layout) for kind in KINDS for layout in layouts(KINDS[kind])]
    asked_for = [(kind, layout) for kind, layout in every if table.Cell(str(layout), kind) not in there]
    found: dict[str, list[Layout]] = {kind: [] for kind in KINDS}
    for kind, layout in asked_for[offset::sample]:
        found[kind].append(layout)
    return found


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[set[ModelKey]], Mapping[ModelKey, Reference]]:
    found: dict[ModelKey, Reference] = {}

    def compute(keys: set[ModelKey]) -> Mapping[ModelKey, Reference]:
        more = keys - found.keys()
        folders = {key: write_model(KINDS[key.kind], key.size, tmp_path_factory.mktemp("model")) for key in more}
        if more:
            found.update(run_ranks(references, ParallelSizes(), folders, timeout_s=1200)[0])
        return {key: found[key] for key in keys}

    return compute


@pytest.mark.parametrize("processes", range(1, PROCESSES + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_is_one_process(
    kind: str,
    processes: int,
    chosen: Mapping[str, list[Layout]],
    of_one_process: Callable[[set[ModelKey]], Mapping[ModelKey, Reference]],
    request: pytest.FixtureRequest,
) -> None:
    own = [each for each in chosen[kind] if each.sizes.world_size == processes]
    if not own:
        pytest.skip("none of these layouts is in the sample")
    world, expected = ParallelSizes(world_size=processes), of_one_process({ModelKey(kind, each.model) for each in own})
    for start in range(0, len(own), LAYOUTS_OF_A_LAUNCH):
        part = own[start : start + LAYOUTS_OF_A_LAUNCH]
        found = run_ranks(compare, world, kind, part, expected, timeout_s=1200)[0]
        differences = {str(layout): each for layout, each in zip(part, found, strict=True)}
        assert not {name: each for name, each in differences.items() if not each.largest <= table.TOLERANCE}
        if request.config.getoption("--page"):
            table.update({table.Cell(name, kind): each.largest for name, each in differences.items()})
