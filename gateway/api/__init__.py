"""HTTP: path operations for three kinds of clients.

`tinker` (the SDK, `/api/v1`), `tandem` (the command line, `/api/tandem/v1`) and `openai` (`/v1`)
have one module per subject, with its models, router and path operations. They share this folder:
`routing` (a router with roles), `dependencies` (gateway, caller, access), `request_body` (bounded
parsing), `errors` (exceptions as answers), `middleware` (around every request) and `fields` (types
of models).

To add an endpoint, write its models and path operation into its subject's module. Add its rows to
`tests/support/gateway/access_world.py` and `test_access_table.py`, then run `make api-docs`. A new
module's router goes into `ROUTERS` in `gateway/app.py`."""
