"""How a model is loaded, sharded and computed: one backend per file.

`base.py` says what a backend must do (`TrainerBackend`) and what it may do in addition
(`ParallelBackend`, `UndoingBackend`, `SleepingBackend`, `LoraBackend`). The built-in backend is
`fsdp2.py`.

To add a backend, write `backends/NAME.py` with a subclass of `TrainerBackend` and
`BACKEND = ThatClass`; a run chooses it by the setting `trainer.backend = NAME`. A package of its
own names its class in the entry-point group `tandem.trainer_backends` instead. Nothing else
needs to change.
"""

from trainer_service.backends.base import (
    LoraBackend,
    ParallelBackend,
    SleepingBackend,
    TrainerBackend,
    UndoingBackend,
    World,
    backend_named,
)

__all__ = [
    "LoraBackend",
    "ParallelBackend",
    "SleepingBackend",
    "TrainerBackend",
    "UndoingBackend",
    "World",
    "backend_named",
]
