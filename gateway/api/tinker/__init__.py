"""The wire protocol of the `tinker` SDK, under `/api/v1`.

A client creates a session (`sessions`), then runs (`training_runs`) or sampling sessions
(`sampling`). It sends operations (`training`) and samples, and fetches their results (`futures`).
`service` holds health and client configuration. The SDK decides names and fields, so a new route
follows its client. See `gateway.api` for how to add one."""
