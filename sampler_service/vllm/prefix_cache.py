"""A request's use of vLLM's prefix cache: less than its contents, or more.

Less: a token is scored from the state one position before it, which the cache does not hold. vLLM
turns the cache off then. Here, a request reads whole blocks up to the first scored token.

More: the cache holds whole blocks, so each sample of one prompt would compute the last, partial
block again. Here the other samples of a group *follow* the first one. Once it has computed the
prompt, they take all keys and values except the last token's. vLLM copies a partly shared block, as
it does for models with a recurrent state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from sampler_service.vllm.internals import scheduler_of, use_look_ups

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import Request

CACHE_LIMIT_ARGUMENT = "tandem_cache_limit"
"""Key in vLLM's `extra_args`: the prompt tokens that a request may read from the cache."""
LEADER_ARGUMENT = "tandem_leader"
"""Key in vLLM's `extra_args`: vLLM's id of the first sample, which shares its prompt."""


class PrefixCache:
    """Wraps the prefix cache's look-ups in an in-process engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self._scheduler = scheduler_of(engine)
        self._manager = self._scheduler.kv_cache_manager
        self._limit: int | None = None
        self._look_up, self._find = use_look_ups(self._manager, self.look_up, self.find_blocks)
        managers = self._manager.coordinator.single_type_managers
        # With a window or a recurrent state, the first sample's blocks lack parts of the prompt.
        is_whole = [type(manager) for manager in managers] == [FullAttentionManager]
        self._block = managers[0].block_size if is_whole and self._manager.enable_caching else 0

    def is_worth_following(self, length: int) -> bool:
        """Return whether waiting for the first sample saves work: its prompt ends in a partial
        block."""
        return bool(self._block and (length - 1) % self._block)

    def has_computed_prompt(self, request_id: str) -> bool:
        request = self._scheduler.requests.get(request_id)
        return request is not None and request.num_computed_tokens >= request.num_prompt_tokens

    def put_first(self, count: int) -> None:
        """Move the last `count` requests of vLLM's queue to its front."""
        self._scheduler.waiting.rotate(count)

    def look_up(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        parameters = request.sampling_params
        extra = (parameters.extra_args if parameters is not None else None) or {}
        leader = extra.get(LEADER_ARGUMENT)
        # A preempted sample finds more in the cache, because its own tokens are there too.
        if leader and not request.num_output_tokens and self.has_computed_prompt(leader):
            return self._prompt_of(leader, tokens=request.num_prompt_tokens - 1)
        self._limit = extra.get(CACHE_LIMIT_ARGUMENT)
        try:
            found: tuple[KVCacheBlocks, int, int] = self._look_up(request)
            return found
        finally:
            self._limit = None

    def find_blocks(self, block_hashes: object, max_cache_hit_length: int) -> object:
        if self._limit is not None:
            max_cache_hit_length = min(max_cache_hit_length, self._limit)
        return self._find(block_hashes, max_cache_hit_length)

    def _prompt_of(self, leader: str, *, tokens: int) -> tuple[KVCacheBlocks, int, int]:
        (blocks,) = self._manager.get_blocks(leader).blocks
        shared = blocks[: -(-tokens // self._block)]
        return self._manager.create_kv_cache_blocks((shared,)), tokens, 0
