"""Tandem's settings, from the environment (`TANDEM_*`) or the command line.

`gateway` holds the settings of the gateway and the platform. `cluster`, `requests`, `sharing` and
`workers` are parts of it. `variables` refuses unknown variables. `chosen_names` has the patterns of
names that people choose, and `paths` the type of optional paths. To add a setting, add a field with
a description, and its name to a subject in `scripts/settings_table.py`."""
