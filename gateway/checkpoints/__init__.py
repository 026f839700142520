"""What is saved on disk: checkpoints, weight versions and base models.

`catalog` maps the names of checkpoints to their files. `versions` keeps the weight versions and
watches the disk space. `pins` says which folders are in use. `collector` removes known folders
without a name and a pin. `copies`, `encryption` and `downloads` do what their names say.
`compatibility` decides whether a run can load a checkpoint; `base_models` lists the models that
clients may ask for. A new kind of checkpoint starts in `gateway.identifiers.CheckpointKind`.
"""
