"""The stack of docker-compose.yaml, built and started for real: `python -m tests.compose`.

`engine` makes the images without any registry: a base image by debootstrap, PostgreSQL and
Prometheus of Debian's packages. `__main__` starts the stack, runs the demo against it from outside,
once undisturbed and once with each container killed, and stops it. It needs a Docker engine
(`DOCKER_HOST`), docker-compose or its plugin, debootstrap and root.
"""
