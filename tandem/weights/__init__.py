"""Weight versions: immutable, checksummed directories of safetensors that a run publishes.

All ranks write into a partial directory at once; the manifest is written last, and one rename
gives the version its name. A reader verifies a version before use (`open_version`); the gateway
removes those that nothing references. The module is torch-free: only the services handle tensors.

A version of a run may be a delta: patches of files of another one, which is whole (`delta`).
`model_files` checks the files of a base model before anything loads them. `model_config` reads a
model's configuration, and `model_store` is the folder of the downloaded base models.
"""

from tandem.weights.manifest import Canary, Checksum, FileEntry, Manifest, checksum_file
from tandem.weights.store import (
    PartialVersion,
    new_version_name,
    open_base,
    open_version,
    version_number,
    version_path,
)

__all__ = [
    "Canary",
    "Checksum",
    "FileEntry",
    "Manifest",
    "PartialVersion",
    "checksum_file",
    "new_version_name",
    "open_base",
    "open_version",
    "version_number",
    "version_path",
]
