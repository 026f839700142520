"""`tandem doctor`: checks of this machine, of a Kubernetes cluster and of a shared volume.

`host`, `cluster` and `volume` yield checks (`check`). `__main__` runs the chosen ones in its own
process, because the command line does not import the gateway. To add a check, yield it from one of
the three. The checks before a job (`--worker`) are `tandem.agent.preflight`, because hosts of
workers need no gateway."""
