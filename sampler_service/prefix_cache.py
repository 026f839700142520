"""How far a request may read from vLLM's prefix cache.

What a prompt token is scored from, the state one token before it, is not in the cache: it must
be computed. vLLM turns the cache off for a request with prompt logprobs; we let it serve what
lies before the first scored token, in whole blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import Request

CACHE_LIMIT_ARGUMENT = "tandem_cache_limit"
"""Under this name a request's extra arguments hold how many tokens it may read."""


def limit_prefix_cache(engine: LLMEngine) -> None:
    """Makes the scheduler of an in-process engine mind the limit of each request."""
    _Limited(engine.engine_core.engine_core.scheduler.kv_cache_manager)


class _Limited:
    """Stands between the scheduler and the cache's look-up (vLLM 0.28 to 0.32)."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._look_up = manager.get_computed_blocks
        self._find = manager.coordinator.find_longest_cache_hit
        self._limit: int | None = None
        manager.get_computed_blocks = self.look_up
        manager.coordinator.find_longest_cache_hit = self.find

    def look_up(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        parameters = request.sampling_params
        extra = (parameters.extra_args if parameters is not None else None) or {}
        self._limit = extra.get(CACHE_LIMIT_ARGUMENT)
        try:
            found: tuple[KVCacheBlocks, int, int] = self._look_up(request)
            return found
        finally:
            self._limit = None

    def find(self, block_hashes: object, max_cache_hit_length: int) -> object:
        if self._limit is not None:
            max_cache_hit_length = min(max_cache_hit_length, self._limit)
        return self._find(block_hashes, max_cache_hit_length)
