"""The garbage collector does not stop the gateway for long."""

from __future__ import annotations

import gc

from tests.support.gateway.running import running_gateway
from tests.support.waiting import wait_until

MANY = 300_000


def test_few_objects_are_young_although_as_many_old_ones_are_freed(tmp_path):
    with running_gateway(tmp_path):
        old = [[] for _ in range(MANY)]
        gc.collect()
        new = []
        while old:
            old.pop()
            new.append([])
        wait_until(lambda: len(gc.get_objects(generation=0)) < MANY / 10)
