"""Workers as pods of a Kubernetes cluster, whose devices are ResourceClaims; see `docs/cluster.md`.

`objects` are what a worker and a device group are made of, from `templates` and with `resources`,
which depend on the `model_size`. These only compute, and `maker` calls them with the gateway's
settings. `launcher` implements the seam: `reconcile` compares the workers that should run
(`worker`) with what a `view` of each kind of object shows, and takes `steps` by the calls of `api`:
it makes what is missing, with the `claims` of device groups and in `turns`, and by `removal` has
nothing be left of what nobody wants. `pods` says what the state of a pod means, `observed` what is
read of an object at all, and `names` what is its worker's. `serving` labels the gateway's own pod.
"""
