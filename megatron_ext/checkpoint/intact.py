"""Verifies, on all ranks together, that a checkpoint still has the bytes that were written."""

from collections.abc import Sequence
from pathlib import Path

import torch

from converters.errors import UserError
from converters.examine.records import records_of
from converters.formats.torch_dist import TorchDistCheckpoint, is_weight
from converters.manifest import Check, checks_of, damages, manifest_of, missing_files

_THREADS = 2


def require_intact(folder: Path, *, weights_only: bool) -> None:
    """Collective: verify the checkpoint in `folder` against its checksums; raise UserError on all ranks if one differs.

    Each rank reads its share of the bytes, so that each is read once. The checksums are those of the manifest, or else
    those that torch keeps with the chunks. With `weights_only` the state of an optimizer is left alone.
    """
    try:
        missing, checks = _checks(folder)
        wanted = [check for check in checks if not weights_only or is_weight(check.key)]
        own = missing or damages(_share(wanted), workers=_THREADS, on_bytes=lambda _nbytes: None)
    except UserError as error:
        own = [str(error)]
    everywhere: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everywhere, own)
    if found := list(dict.fromkeys(damage for each in everywhere for damage in each)):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"{folder} is damaged: {found[0]}{more}; `megarl verify` names all, copy it again")


def _checks(folder: Path) -> tuple[list[str], Sequence[Check]]:
    """Files of the checkpoint that are missing, and the checks of all others."""
    found = manifest_of(folder)
    if found is None:
        return [], list(records_of(TorchDistCheckpoint(folder)))
    root, manifest = found
    below = folder.absolute().relative_to(root.absolute())
    missing = [f"{file} is missing" for file in missing_files(root, manifest) if Path(file).parent == below]
    return missing, [each for each in checks_of(root, manifest) if Path(each.file).parent == below]


def _share(checks: Sequence[Check]) -> list[Check]:
    """This rank's checks, with about as many bytes as every other rank's."""
    ordered = sorted(checks, key=lambda check: (-check.nbytes, check.file, check.key))
    return ordered[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
