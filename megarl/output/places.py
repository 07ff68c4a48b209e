"""Paths that a run writes below its output_dir, and the check that none of them is an input."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import UserError

if TYPE_CHECKING:
    from megarl.schema import MegarlConfig

CHECKPOINTS = "checkpoints"
EXPORT = "huggingface"
ADAPTER = "adapter"
"""Export of the adapter, if one is trained."""
LOGS = "logs"
PROFILES = "profiles"
TRAINED_AUXILIARY = ("critic", "implicit_reward_model")
"""Models exported under their own names."""

_LONGEST_NAME = 255
"""Maximum length in bytes of a file name, in all common Linux file systems."""
_LONGEST_PATH = 3840
"""Maximum length in bytes of the folder: the 4096 of a Linux path, minus room for paths inside."""
_SHOWN = 40


def next_export(export: Path) -> Path:
    """Where an export is written before it is moved to its place."""
    return export.with_name(f".{export.name}.next")


def previous_export(export: Path) -> Path:
    """Where a replaced export is moved."""
    return export.with_name(f".{export.name}.previous")


_EXPORTS = (Path(EXPORT), Path(ADAPTER), *map(Path, TRAINED_AUXILIARY))
_FOLDERS = (
    *map(str, _EXPORTS),
    *(str(beside(export)) for export in _EXPORTS for beside in (next_export, previous_export)),
    *(CHECKPOINTS, LOGS, PROFILES),
)


def models_of(config: "MegarlConfig") -> Iterator[tuple[str, Path]]:
    """Every folder of weights that a configuration reads, with its key; ranks and engines on all machines read them."""
    models = {
        "model.path": config.model.path,
        "model.megatron_checkpoint": config.model.megatron_checkpoint,
        "lora.path": config.lora.path,
        "critic.path": config.critic.path,
        "reward_model.path": config.reward_model.path,
        "implicit_reward_model.path": config.implicit_reward_model.path,
        **{f"teachers.{name}.path": teacher.path for name, teacher in config.teachers.items()},
    }
    yield from ((key, Path(path)) for key, path in models.items() if path)


def inputs_of(config: "MegarlConfig") -> Iterator[tuple[str, Path]]:
    """Every file and folder that a configuration reads, with its key."""
    yield from models_of(config)
    for name, section in (("data", config.data), ("sft", config.sft), ("preference", config.preference)):
        yield from ((f"{name}.train_files", Path(file)) for file in section.train_files)
        yield from ((f"{name}.eval_files", Path(file)) for file in section.eval_files)
    functions = {
        "reward.function": config.reward.function,
        **{f"reward.functions.{name}.function": term.function for name, term in config.reward.functions.items()},
    }
    for key, spec in functions.items():
        file, colon, _ = spec.rpartition(":")
        if colon:
            yield key, Path(file)


def check_name(said: str, folder: str) -> None:
    """Raise UserError for an invalid folder name; `said` is the option or key that the user gave."""
    if not folder.strip() or "\0" in folder:
        raise UserError(
            f"{said}={folder!r} is no name: give the folder that the run writes, for instance {said}=runs/mine"
        )
    longest = max(len(os.fsencode(part)) for part in (*Path(folder).parts, ""))
    if longest > _LONGEST_NAME or len(os.fsencode(os.path.abspath(folder))) > _LONGEST_PATH:
        raise UserError(f"{said}={folder[:_SHOWN]}... is longer than a file system takes: choose a shorter name")


def check_output(config: "MegarlConfig", written: Collection[str] | None = None) -> None:
    """Raise UserError unless `output_dir` can be a folder, and writing `written` there leaves the inputs intact.

    Without `written` this is everything that the training commands and any logger write.
    """
    # Imported here, since parsing a command line needs no logger.
    from megarl.tracking import LOGGERS

    folders = (*_FOLDERS, *(name for kind in LOGGERS.values() for name in kind.folders))
    if written is None:
        written = (*folders, *(name for kind in LOGGERS.values() for name in kind.files))
    output = Path(config.output_dir)
    check_name("output_dir", config.output_dir)
    for path in (output, *output.parents):
        if os.path.exists(path) and not os.path.isdir(path):
            raise UserError(f"output_dir={output} cannot be a folder: {path} is a file; choose another output_dir")
    for name in written:
        place = output / name
        if os.path.exists(place) and os.path.isdir(place) != (name in folders):
            raise UserError(
                f"{place} is in the way: the run writes a {'folder' if name in folders else 'file'} of that name; move"
                " it away or choose another output_dir"
            )
        for key, path in inputs_of(config):
            if _touches(path, place):
                raise UserError(
                    f"the run would write over its own input: {key}={path} lies at, in or around {place}; choose "
                    "another output_dir"
                )


def _touches(path: Path, place: Path) -> bool:
    real_place = os.path.realpath(place)
    return any(_is_within(real, real_place) or _is_within(real_place, real) for real in _real_paths(path))


def _real_paths(path: Path) -> Iterator[str]:
    """The real path of `path`, and those of its files, as a model may be a folder of links."""
    yield os.path.realpath(path)
    if os.path.isdir(path):
        yield from (os.path.realpath(entry.path) for entry in os.scandir(path) if entry.is_symlink())


def _is_within(path: str, other: str) -> bool:
    return os.path.commonpath([path, other]) == other
