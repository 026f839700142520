"""Weight versions: immutable, checksummed directories of safetensors that a run publishes.

A version is written into a partial directory by every rank at once, gets its manifest last
and its final name by one rename; a reader verifies it before use; collection removes those
that nothing names. Torch-free: tensors are the business of the two services.
"""

from tandem.weights.manifest import Canary, FileEntry, Manifest, checksum_file
from tandem.weights.store import (
    PartialVersion,
    collect,
    new_version_name,
    open_version,
    sweep_partials,
    version_path,
)

__all__ = [
    "Canary",
    "FileEntry",
    "Manifest",
    "PartialVersion",
    "checksum_file",
    "collect",
    "new_version_name",
    "open_version",
    "sweep_partials",
    "version_path",
]
