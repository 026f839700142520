"""How a model is computed: backends behind one interface, found by name.

The built-in one is `fsdp2`. Others register with `@trainer_backend(name)`, or from another
package by an entry point in the group `tandem.trainer_backends`.
"""

from trainer_service.backends.base import TrainerBackend, World
from trainer_service.backends.registry import backend_named, trainer_backend

__all__ = ["TrainerBackend", "World", "backend_named", "trainer_backend"]
