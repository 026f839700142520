"""The gateway: a FastAPI application that runs trainers and samplers for its clients.

`app` builds the application and `core` the `Gateway` with its parts. `housekeeping` does periodic
work. `api` holds the HTTP routes. `runs` trains, `sampling` samples, and both keep weights in
`checkpoints`. `workers` shares the devices, and starts and calls processes. `owners` holds keys,
sessions, limits and usage, `storage` the database, and `admin` offline tools. A request passes
`api`, then `runs` or `sampling`, then `workers`. The loose files `identifiers` and `metrics` import
nothing of the gateway."""
