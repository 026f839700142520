"""Checkpoints, weight versions and base models on the disk.

`catalog` maps checkpoint names to files. `versions` stores weight versions. `pins` marks folders in
use, and `collector` removes known folders without a name or a pin. `copies` copies checkpoints,
`encryption` encrypts versions, and `downloads` signs addresses. `compatibility` decides whether a
run can load a checkpoint. `base_models` lists base models. A new kind of checkpoint starts in
`gateway.identifiers.CheckpointKind`."""
