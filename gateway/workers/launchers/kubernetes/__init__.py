"""Workers as pods of a Kubernetes cluster, with ResourceClaims for devices.

See `docs/design/kubernetes.md`.

Pure functions compute the objects: `objects` from `templates` and `resources`.
`maker` calls them with the gateway's settings. `launcher` implements the interface. `reconcile`
compares wanted workers (`worker`) with a `view` of each kind of object, and takes `steps` through
`api`. It creates missing objects, with the group's `claims` and in `turns`, and `removal` deletes
unwanted ones. `pods` interprets a pod's state, `observed` lists the fields read, `names` the naming
rules, and `serving` labels the gateway's own pod. To add a kind of object, render it in `objects`
and give `reconcile` a view of it."""
