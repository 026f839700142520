"""Jobs: whole trainings of other frameworks. See `docs/design/jobs.md`.

`python -m trainer_service.jobs` is the worker of kind `job`. It imports no torch. `runner` starts
torchrun in the framework's environment, and `end` describes its end. A folder such as `trl` is the
program of a framework. It runs in that framework's environment, so it imports nothing of Tandem.

To add a framework, add its configuration to `tandem/backends` and its program as a folder here."""
