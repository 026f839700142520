"""The playground: visitors tune a blueprint, one after the other.

A *trial* is one visitor's tuning of one blueprint. `queue` decides which trial starts. `trials` has
the trials, from their request until nothing of them is left. A runner (`tandem.blueprints.runner`)
claims a trial and trains it as an ordinary client, with a key of the visitor. The trial's id is the
project of its sessions, and so leads to its runs, its usage and its checkpoints."""
