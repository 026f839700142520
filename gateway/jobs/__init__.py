"""Whole trainings of other frameworks, such as TRL. See `docs/design/jobs.md`.

A job is a run with a row in `jobs`. `submission` checks a request, writes the job's files
(`files`, `data`), and then the rows of its session, its run and itself. `registry` knows the jobs
that have not ended, and ends them. `life` places a job's worker, follows its attempts, and imports
the result (`results`). A file is the only message from a worker: so a gateway that restarts reads
on where the last one stopped.

To add a framework, register its description (`tandem.backends`). Nothing here depends on one."""
