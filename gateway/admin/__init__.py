"""Programs of the command line that need the gateway's code, but no running gateway.

`backup` saves and restores a data directory's database, `offline_keys` manages its keys, `doctor`
checks this machine, a cluster or a volume, `pod_resources` computes the requests of pods, and
`view` shows runs from their files. The command line starts each as `python -m`, because it does not
import the gateway. `request` reads the request and writes the answer."""
