"""`tandem doctor`: checks of this machine, of a Kubernetes cluster and of a shared volume.

`host`, `cluster` and `volume` each yield checks (`check`). `__main__` runs the chosen ones in a
process of its own, because the command line does not import the gateway. The command prints all
checks as one table. To add a check, yield it from one of the three modules.
"""
