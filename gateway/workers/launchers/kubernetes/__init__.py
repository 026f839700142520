"""Workers as pods of a Kubernetes cluster, whose devices are ResourceClaims; see `docs/cluster.md`.

`objects` are what a worker and a device group are made of, from `templates` and with `resources`.
These three only compute, and `maker` calls them with the gateway's settings. `launcher` implements
the seam: `reconcile` compares the workers that should run (`worker`) with what a `view` of each
kind of object shows, and takes `steps` by the calls of `api`: to what is missing (the `claims` of
device groups first, pods in `turns`), and, by `removal`, until nothing is left. `pods` says what the state of a pod
means, and `observed` what is read of an object at all. `serving` labels the gateway's own pod.
"""
