"""`python -m tests.compose` builds, starts and disturbs the stack of docker-compose.yaml.

`engine` makes the images without any registry: a base image by debootstrap, PostgreSQL and
Prometheus of Debian's packages. `__main__` starts the stack and runs the demo against it (`demo`):
undisturbed, with each container killed, and on a backup restored by the page's commands
(`manual`). It needs a Docker engine (`DOCKER_HOST`), docker-compose or its plugin, debootstrap and
root."""
