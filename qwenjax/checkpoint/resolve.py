"""From what a user calls a model to a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from qwenjax.checkpoint.safetensors import CheckpointError

# What a checkpoint is served from; repositories often hold the same weights in other formats beside it.
_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt"]


def resolve(model: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `model` itself where it is one, else the cached snapshot of that Hugging Face
    repo id, downloaded if it is not there. HF_HUB_OFFLINE=1 and HF_HOME mean what they mean to huggingface_hub.

    Raises CheckpointError where there is no such folder, repository or cached snapshot, and for the revision of a
    folder.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise CheckpointError(f"model is {model!r}; it is a checkpoint folder, or a Hugging Face repo id")
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision is {revision!r}, and {model} is a folder; repositories have revisions")
        return folder
    name = str(model)
    if folder.exists():
        raise CheckpointError(f"{model}: is a file; a checkpoint is a folder, or a Hugging Face repo id")
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{model}: no such folder")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model}: no such folder, and the Hugging Face cache has no snapshot of it that can be used offline: "
            f"{_one_line(error)}"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(f"{model}: no such folder, and no repository to be had: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
