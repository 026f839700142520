"""How the gateway starts workers, learns that they are ready or gone, and ends them.

`base` is the seam that the rest of the gateway codes against. `process` implements it with
processes on this machine; `backoff` says how long to wait before a worker is started again.
"""
