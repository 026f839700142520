"""Workers as pods of a Kubernetes cluster, whose devices are ResourceClaims; see `docs/cluster.md`.

`objects` are what a worker and a device group are made of, from `templates` and with `resources`.
These three only compute.
"""
