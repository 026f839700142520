"""The settings of Tandem, from the environment (`TANDEM_*`) or the command line.

`gateway` has the settings of the gateway and of the whole platform; `cluster`, `requests`,
`sharing` and `workers` are its parts. `variables` refuses unknown names of variables.
`chosen_names` has the patterns of names that people choose. To add a setting, add a field to one of
these classes.
"""
