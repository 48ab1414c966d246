"""`push`: upload a written directory to a repository of the Hub."""

from __future__ import annotations

from pathlib import Path

from blockdiff.checkpoint.files import first_line
from blockdiff.errors import CheckpointError
from blockdiff.files import is_hub_id


def require_hub_id(hub_id: str) -> None:
    """Raise CheckpointError if `hub_id` does not name a repository of the Hub."""
    if "/" not in hub_id or not is_hub_id(hub_id):
        raise CheckpointError(f"{hub_id!r} is no hub id; give OWNER/NAME")


def push(directory: str | Path, hub_id: str) -> str:
    """Upload a checkpoint or an adapter to the Hub, as the user who is logged in; returns its address.

    A repository that does not exist is created as a private one. Raises CheckpointError; the directory stays as it is.
    """
    require_hub_id(hub_id)
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = str(hub.create_repo(hub_id, private=True, exist_ok=True))
        hub.upload_folder(repo_id=hub_id, folder_path=directory)
    except Exception as error:  # the Hub's client raises its own errors, and those of its HTTP client
        remedy = f"the directory is whole, try again: `hf upload {hub_id} {directory}`"
        raise CheckpointError(f"{directory}: not uploaded to {hub_id} ({first_line(error)}); {remedy}") from error
    return address
