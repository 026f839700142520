"""The client-side library for loops: advantages and batches, in plain Python and numpy.

It knows nothing of servers; what it returns goes into `tinker.types.Datum`.
"""

from tandem.rl.advantages import ALGORITHMS, advantages
from tandem.rl.schedule import linear_decay

__all__ = ["ALGORITHMS", "advantages", "linear_decay"]
