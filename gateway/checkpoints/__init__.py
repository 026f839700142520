"""What is saved on disk: checkpoints, weight versions and base models.

`catalog` maps the names of checkpoints to their files; `versions` keeps the weight versions and
watches the disk space; `pins` says which folders are in use, and `collector` removes those that
nothing names and nothing pins. Complete checkpoints of which the database knows nothing go to the
`quarantine`; each has a record of what it is (`records`), from which `adoption` makes its rows
again. `copies`, `encryption` and `downloads` do what their names say;
`compatibility` decides whether a run can load a checkpoint; `base_models` lists the models that
clients may ask for. A new kind of checkpoint starts in `gateway.identifiers.CheckpointKind`.
"""
