"""Workers as pods of a Kubernetes cluster, with ResourceClaims for devices.

See `docs/design/kubernetes.md`.

Pure functions compute the objects: `objects` from `templates`, `resources` and
`defaults/worker-objects.yaml`. `maker` calls them with the gateway's settings. `launcher`
implements the interface. `reconcile` compares wanted workers (`worker`) with a `view` of each kind
of object, and takes `steps` through `api`. It creates missing objects, with the group's `claims`,
and `removal` deletes unwanted ones. `pods` interprets a pod's state, `observed` lists the fields
read, `names` the kinds and naming rules, and `serving` labels the gateway's own pod. To add a kind
of object, render it in `objects` and give `reconcile` a view of it."""
