"""HTTP: path operations for three kinds of clients, over the parts of the gateway.

`tinker` (the SDK, `/api/v1`), `tandem` (the command line, `/api/tandem/v1`) and `openai` (`/v1`)
have one module per subject: its request and response models, its router, its path operations. They
share what lies in this folder: `routing` (a router whose operations state a role), `dependencies`
(the gateway, the caller, what the caller names), `request_body` (bounded reading and parsing),
`errors` (exceptions as answers, by dialect), `middleware` (what surrounds every request) and
`fields` (types of models). `standby` answers while another gateway serves.

To add an endpoint: write its models and its path operation into the module of its subject, and its
rows into `tests/support/gateway/access_world.py` and `test_access_table.py`; then `make api-docs`.
A new module's router goes into `ROUTERS` in `gateway/app.py`.
"""
