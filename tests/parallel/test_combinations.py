"""Every layout of every kind of model gives what one process gives; with `--page` a page of it is written."""

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import table
from combinations import KINDS, PROCESSES, Layout, layouts
from launch import run_ranks
from reference import write_model
from run import ModelKey, Reference, compare, references

from converters.layouts.megatron import ParallelSizes

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(3600)]


LAYOUTS_OF_A_LAUNCH = 30


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Callable[[str], list[Layout]]:
    """The layouts of a kind of model that are asked for: of all numbers of processes and kinds of parallelism."""
    sample, offset, missing = (request.config.getoption(name) for name in ("--sample", "--offset", "--missing"))
    there = table.read(table.PAGE.read_text()) if missing else {}

    @cache
    def choose(kind: str) -> list[Layout]:
        return [each for each in layouts(KINDS[kind]) if table.Cell(str(each), kind) not in there][offset::sample]

    return choose


@pytest.fixture(scope="module")
def of_one_process(
    chosen: Callable[[str], list[Layout]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Mapping[ModelKey, Reference]]:
    @cache
    def compute(kind: str) -> Mapping[ModelKey, Reference]:
        keys = {ModelKey(kind, each.model) for each in chosen(kind)}
        folders = {key: write_model(KINDS[kind], key.size, tmp_path_factory.mktemp("model")) for key in keys}
        return run_ranks(references, ParallelSizes(), folders)[0]

    return compute


@pytest.mark.parametrize("processes", range(1, PROCESSES + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_is_one_process(
    kind: str,
    processes: int,
    chosen: Callable[[str], list[Layout]],
    of_one_process: Callable[[str], Mapping[ModelKey, Reference]],
    request: pytest.FixtureRequest,
) -> None:
    own = [each for each in chosen(kind) if each.sizes.world_size == processes]
    if not own:
        pytest.skip("none of these layouts is in the sample")
    world = ParallelSizes(world_size=processes)
    for start in range(0, len(own), LAYOUTS_OF_A_LAUNCH):
        part = own[start : start + LAYOUTS_OF_A_LAUNCH]
        found = run_ranks(compare, world, kind, part, of_one_process(kind), timeout_s=1200)[0]
        differences = {str(layout): each for layout, each in zip(part, found, strict=True)}
        assert not {name: each for name, each in differences.items() if not each.largest <= table.TOLERANCE}
        if request.config.getoption("--page"):
            table.update({table.Cell(name, kind): each.largest for name, each in differences.items()})
