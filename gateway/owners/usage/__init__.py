"""Metering, billing reports and traces.

`meter` sums usage by hour. `reports` reads the sums in the SDK's terms. `trace_exports` writes a
session as a Chrome trace. `sampled_versions` remembers the weights behind in-flight samples.
`time_shares` divides the time of optimizer steps. `run_resources` sums the processors, devices and
memory of a run. A new kind of usage needs a value of `UsageKind` and a line in `reports`."""
