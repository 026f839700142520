"""Tandem's own routes under `/api/tandem/v1`, for the command line and for scripts.

Each module holds one subject's models, router and path operations, such as `runs` or `groups`.
`status` also serves `/metrics` and `/openapi.json`. See `gateway.api` for how to add a route."""
