"""The protocol between the processes of Tandem: gateway, agent, trainers and samplers.

`worker` is the specification of a worker and its handshake with its launcher, over a
`worker_link`. `worker_server` is the gRPC server of a worker, with its `metrics_server`. `channels`
connect to workers and agents, with TLS by a `certificate` of the installation's `authority`. Each
call carries an `epoch`, and a call to a worker with a lease also a token (`fencing`). `heartbeat`
and `exit_watchers` report processes that hang or end. `devices` names devices, `sample_limits`
checks sample requests, and `http_host` and `own_machine` are for HTTP on this machine.

It imports settings, errors, logs and the generated stubs (`tandem.v1`), and no other folder.
"""
