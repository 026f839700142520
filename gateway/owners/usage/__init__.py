"""What was used, and when: metering, the reports of the billing calls, and traces.

`meter` adds up usage by hour in memory and writes the sums every few seconds; training runs and
samplers report to it what their workers did. `reports` reads the sums in the SDK's terms.
`trace_exports` writes one session's events as a Chrome trace. `sampled_versions` remembers which
weights the tokens of requests in flight came from. To meter something new, add its kind to
`UsageKind` and say in `reports` what it counts as.
"""
