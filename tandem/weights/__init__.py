"""Weight versions: immutable, checksummed directories of safetensors that a run publishes.

All ranks write into a partial directory. The manifest comes last, and one rename gives the version
its name (`store`, `manifest`). A reader verifies a version first (`open_version`). The gateway
removes unreferenced versions. `sums` lets an engine prove its weights.

`serving` renders the commands and the manifest that serve a checkpoint without Tandem.

For base models, `model_files` checks the files, `model_config` reads the configuration, `tensors`
reads safetensors headers, and `model_store` is the folder of downloads.

Nothing here imports torch at import time. To add a field to a version, add it to `Manifest` with a
default, so that older versions stay readable."""

from tandem.weights.manifest import Canary, Checksum, FileEntry, Manifest, checksum_file
from tandem.weights.store import (
    PartialVersion,
    new_version_name,
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
    "open_version",
    "version_number",
    "version_path",
]
