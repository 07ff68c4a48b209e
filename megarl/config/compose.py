"""Composes a recipe and overrides into one typed configuration, in which every key is known and has its type."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from converters.errors import UserError, did_you_mean
from megarl.config.folder import recipes_folder
from megarl.config.keys import check_keys
from megarl.config.renamed_keys import ELSEWHERE, OWNED
from megarl.config.schedule import with_correction
from megarl.rollout import ENGINES
from megarl.schema import MegarlConfig
from megatron_ext.options.arguments import check_options

PRESETS = ("algorithm",)
"""Groups of the configuration that have a folder of presets."""
_REPLACES_NOTHING = re.compile(r"No match in the defaults list\. To append to your default list use (\S+)")
"""Hydra's message if an override replaces a preset and the recipe has none."""
_BUILT_ON = re.compile(r"In '([^']*)': Could not ")
"""Hydra's message before the name of a missing file; it names the file that refers to it."""
_KEY_ALONE = re.compile(r"\+*([\w.]+)")
_WANTS_LIST = "is not a ListConfig"
"""OmegaConf's message if a list is set to a single value."""


def compose(config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None) -> MegarlConfig:
    """Compose recipe `config_name` with Hydra `overrides` (`loop.steps=10`) into a configuration.

    Recipes are looked up in `config_dir`, if given, before megarl's own. Raises UserError, naming the key, for an
    unknown key, a value of the wrong type, or a mandatory key without a value.
    """
    merged = _merge(config_name, overrides, config_dir)
    if left_open := _open_keys(merged):
        raise UserError(f"recipe {config_name} leaves {left_open[0]} open: give it as {left_open[0]}=...")
    with _naming_the_key():
        OmegaConf.resolve(merged)
        config = OmegaConf.to_object(merged)
    assert isinstance(config, MegarlConfig)
    config.megatron = _check_megatron("megatron", config.megatron)
    config.critic.megatron = _check_megatron("critic.megatron", config.critic.megatron)
    config.reward_model.megatron = _check_megatron("reward_model.megatron", config.reward_model.megatron)
    implicit = config.implicit_reward_model
    implicit.megatron = _check_megatron("implicit_reward_model.megatron", implicit.megatron)
    for name, teacher in config.teachers.items():
        teacher.megatron = _check_megatron(f"teachers.{name}.megatron", teacher.megatron)
    if kind := ENGINES.get(config.rollout.engine):
        kind.check(config.rollout.engine_args)
    config.algorithm = with_correction(config)
    return config


def open_keys(config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None) -> list[str]:
    """The mandatory keys that a recipe with overrides leaves without a value. Raises UserError as `compose` does."""
    return _open_keys(_merge(config_name, overrides, config_dir))


def files_of(config_name: str, overrides: Sequence[str], config_dir: str | None) -> list[tuple[Path, str]]:
    """The files of which Hydra composes a recipe, in its order, each with the group that its keys are in."""
    folders = _folders(config_dir)
    with _hydra(config_name, folders) as searchpath:
        found = (
            GlobalHydra.instance()
            .config_loader()
            .compute_defaults_list(config_name, [*searchpath, *map(_checked_override, overrides)], RunMode.RUN)
        )
    named = [(each.config_path, each.package or "") for each in found.defaults if each.config_path]
    # Hydra's own settings come from its package.
    return [
        (next(file for folder in folders if (file := folder / f"{path}.yaml").is_file()), group)
        for path, group in named
        if not path.startswith("hydra/")
    ]


def _merge(config_name: str, overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Merge the recipe into the schema, which checks keys and types; mandatory keys may still lack a value."""
    folders = _folders(config_dir)
    with _hydra(config_name, folders) as searchpath:
        recipe = hydra_compose(config_name, [*searchpath, *map(_checked_override, overrides)])
    _check_not_empty(config_name, folders)
    values = OmegaConf.to_container(recipe, resolve=False)
    assert isinstance(values, dict)
    check_keys(values)
    with _naming_the_key():
        merged = OmegaConf.merge(_schema(), recipe)
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _schema() -> DictConfig:
    """The schema as OmegaConf's container, which a merge copies."""
    schema = OmegaConf.structured(MegarlConfig)
    assert isinstance(schema, DictConfig)
    return schema


def _check_not_empty(config_name: str, folders: Sequence[Path]) -> None:
    file = next((file for folder in folders if (file := folder / f"{config_name}.yaml").is_file()), None)
    if file and yaml.safe_load(file.read_text()) is None:
        raise UserError(
            f"recipe {config_name} is empty: {file} has no key; give it some, or begin with the keys of another"
            " recipe, as `defaults: [grpo_qwen3_moe, _self_]` does"
        )


def _open_keys(merged: DictConfig) -> list[str]:
    with _naming_the_key():
        return sorted(OmegaConf.missing_keys(merged))


@contextmanager
def _naming_the_key() -> Iterator[None]:
    """Convert errors of OmegaConf to UserErrors that name the key."""
    try:
        yield
    except OmegaConfBaseException as error:
        key, reason = error.full_key, str(error.msg).splitlines()[0]
        if _WANTS_LIST in reason:
            raise UserError(
                f"{key}={error.value}: {key} is a list; put its values in brackets, '{key}=[{error.value}]'"
            ) from error
        raise UserError(f"configuration key {key}: {reason}") from error


def _check_megatron(group: str, options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name in OWNED:
            raise UserError(f"{group}.{name} follows from {OWNED[name]}: set {OWNED[name]} instead")
        if name in ELSEWHERE:
            raise UserError(f"{group}.{name} is no option of megatron-core; did you mean {ELSEWHERE[name]}?")
    return check_options(options, f"{group}.")


def _folders(config_dir: str | None) -> list[Path]:
    return [*([Path(config_dir).resolve()] if config_dir else []), recipes_folder()]


@contextmanager
def _hydra(config_name: str, folders: Sequence[Path]) -> Iterator[list[str]]:
    """Initialise Hydra for a recipe in these folders; yields the overrides that make it search all of them."""
    first, *others = folders
    if not first.is_dir():
        raise UserError(f"--config-dir {first} is not a folder")
    if "/" in config_name:
        raise UserError(
            f"there is no recipe {config_name}: a recipe's name has no folder in it, which --config-dir gives"
            f"{_names_like(config_name.rpartition('/')[2].removesuffix('.yaml'), folders)}"
        )
    search_path = ",".join(f"'file://{folder}'" for folder in others)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(first)):
            yield [f"hydra.searchpath=[{search_path}]"] if others else []
    except MissingConfigException as error:
        if error.missing_cfg_file not in (config_name, f"{config_name}.yaml"):
            raise UserError(_no_file(config_name, error, folders)) from error
        raise UserError(f"there is no recipe {config_name}{_names_like(config_name, folders)}") from error
    except RecursionError as error:
        raise UserError(f"recipe {config_name} cannot be composed: its defaults lead back to itself") from error
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {config_name} cannot be composed: it is not text in UTF-8 ({error})") from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        if replaced := _REPLACES_NOTHING.search(reason):
            raise UserError(f"recipe {config_name} has no preset to replace: add one with {replaced[1]}") from error
        raise UserError(f"recipe {config_name} cannot be composed: {reason}") from error


def _no_file(config_name: str, error: MissingConfigException, folders: Sequence[Path]) -> str:
    """The message for a recipe that exists, but is based on a file that does not."""
    group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
    if group not in PRESETS:
        above = _BUILT_ON.match(error.args[0])
        builder = above[1] if above else config_name
        return f"recipe {builder} builds on {error.missing_cfg_file}, which does not exist{_names_like(name, folders)}"
    hint = _names_like(name, [folder / group for folder in folders])
    return f"recipe {config_name}: there is no preset {group}={name}{hint}"


def _names_like(name: str, folders: Sequence[Path]) -> str:
    """The end of a message about a name that no file in these folders has: the nearest name, or else all names."""
    names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    return did_you_mean(name, names) or f"; there are {', '.join(names)}"


def _quoting_hint(text: str) -> str:
    """How to quote a value whose characters Hydra accepts only in quotes, since the shell removes its own quotes."""
    key, equals, value = text.partition("=")
    if not equals or not key.replace(".", "").replace("_", "").isalnum() or any(quote in value for quote in "'\""):
        return ""
    return f"; give the value in quotes of its own, \"{key}='{value}'\""


def _checked_override(text: str) -> str:
    """Convert an override to the form that Hydra accepts for keys that a recipe lacks; the schema checks them later.

    Raises UserError for text that is not an override of a single value.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        alone = _KEY_ALONE.fullmatch(text)
        reason = f"give {alone[1]}=VALUE" if alone else f"{str(error).splitlines()[0]}{_quoting_hint(text)}"
        raise UserError(f"override {text!r} is not of the form key=value: {reason}") from error
    if not override.key_or_group:
        raise UserError(f"override {text!r} is not of the form key=value: it has no key")
    if re.split("[./]", override.key_or_group)[0] == "hydra":
        raise UserError(
            f"override {text!r} would set Hydra's own options, of which megarl uses none: files go where output_dir"
            " says, and further recipes lie where --config-dir does"
        )
    if override.is_sweep_override():
        key, _, values = text.partition("=")
        raise UserError(
            f"override {text!r} gives several values: a list has them in brackets, '{key}=[{values}]', and one value "
            f"with commas has quotes of its own, \"{key}='{values}'\""
        )
    changes_value = not override.is_delete() and not override.is_add() and not override.is_force_add()
    return f"++{text}" if changes_value and not chooses_file(override) else text


def chooses_file(override: Override) -> bool:
    """Whether an override chooses a file, as `algorithm=gspo` does in configs/algorithm/, and does not set a value."""
    group = override.key_or_group
    return "/" in group or group in PRESETS or override.package is not None
