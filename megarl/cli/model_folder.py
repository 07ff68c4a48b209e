"""Checks the HuggingFace folder that a command gives to an engine."""

from pathlib import Path

from converters.errors import UserError


def refuse_checkpoint(folder: Path) -> None:
    """Raise UserError for a Megatron checkpoint as --model, with the command that exports it to HuggingFace."""
    if (folder / "config.json").exists() or not folder.is_dir():
        return
    # Imported only if needed, since it takes seconds.
    from converters.formats.torch_dist import find_checkpoint

    try:
        find_checkpoint(folder)
    except UserError:
        return
    raise UserError(
        f"--model {folder} is a Megatron checkpoint, and engines read HuggingFace folders: "
        f"megarl export --megatron {folder} --out DIR makes one of it"
    )
