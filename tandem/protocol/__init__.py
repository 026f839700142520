"""The protocol between Tandem's processes: gateway, agent, trainers and samplers.

- `worker`: a worker's specification and its handshake with the launcher, over a `worker_link`.
- `worker_server`: a worker's gRPC server. `metrics_server`: its metrics.
- `channels`: connections to workers and agents, with a `certificate` of the installation's
  `authority`.
- `epoch` and `fencing`: refuse calls of earlier gateways, and calls without the current lease.
- `heartbeat` and `exit_watchers`: report processes that hang or end.
- `devices`: names of devices. `sample_limits`: checks sample requests.
- `process_use` and `use_metrics`: a worker's processors, devices and memory. `sign_in_code`:
  codes in links to the page.
- `http_host` and `own_machine`: HTTP on this machine. `background`: work at low priority.

The folder imports only settings, errors, logs and the generated stubs. To add a call, extend
`protos/` and the servicer. Raise `worker.PROTOCOL` if an older peer would misunderstand it."""
