"""vLLM's second model runner (default on GPUs), interpreted, passes the first one's tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from pathlib import Path

import pytest

from tests.component.sampler import (
    test_async_scheduling,
    test_in_flight,
    test_lora,
    test_prompts,
    test_samples,
    test_structured_output,
    test_versions,
)
from tests.component.sampler.test_in_flight import versions  # noqa: F401 (a fixture)
from tests.component.sampler.test_lora import two  # noqa: F401 (a fixture)
from tests.support.sampler_worker import SamplerClient, sampler_process

TRITON = Path(sys.prefix) / "triton"
INTERPRETED = Path(__file__).parents[2] / "support" / "interpreted_triton"

REPEATED = [
    test_samples.test_sampled_logprobs_equal_a_plain_forward,
    test_samples.test_filters_renormalise_the_logprobs_of_what_they_leave,
    test_samples.test_logprobs_are_of_the_distribution_after_penalties_and_filters,
    test_samples.test_topk_lists_the_likeliest_and_leaves_cells_of_excluded_tokens_empty,
    test_samples.test_a_sample_depends_on_seed_and_index_alone_not_on_how_many_there_are,
    test_samples.test_without_a_seed_samples_differ,
    test_prompts.test_prompt_logprobs_of_many_prompts_at_once_are_each_their_own,
    test_prompts.test_a_scored_suffix_is_exact_wherever_the_cached_blocks_end,
    test_prompts.test_topk_of_the_prompt_lists_the_likeliest_at_each_position,
    test_prompts.test_targets_are_scored_at_their_positions_and_empty_cells_are_zero,
    test_prompts.test_drawn_alternatives_have_the_models_logprobs,
    test_prompts.test_cached_prompts_of_the_old_version_are_not_used_with_the_new_one,
    test_prompts.test_samples_that_share_a_prefill_are_those_that_compute_it_each,
    test_versions.test_a_published_version_is_served_exactly_and_the_base_again_after_it,
    test_versions.test_a_bad_version_is_refused_and_the_old_one_goes_on_serving,
    test_lora.test_adapters_and_the_base_model_are_computed_in_one_batch_each_with_its_own_numbers,
    test_lora.test_targets_and_topk_of_the_prompt_are_the_adapters,
    test_lora.test_adapters_and_full_versions_take_turns_in_one_engine,
    test_structured_output.test_samples_match_a_regex_and_end_with_the_end_token,
    test_structured_output.test_adapters_and_the_base_model_follow_grammars_side_by_side,
]
SLOWLY = [
    test_async_scheduling.test_samples_are_the_same_and_a_pause_takes_none_twice,
    test_samples.test_answers_do_not_depend_on_how_requests_are_batched,
    test_in_flight.test_tokens_before_a_load_are_of_the_old_version_and_those_after_it_of_the_new,
    test_in_flight.test_requests_go_on_with_the_next_adapter_while_others_keep_theirs,
]


pytestmark = pytest.mark.slow


def nightly(test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def repeated(*given: object, **named: object) -> None:
        test(*given, **named)

    return pytest.mark.nightly(repeated)


globals().update({test.__name__: test for test in [*REPEATED, *map(nightly, SLOWLY)]})


def interpret(patch: pytest.MonkeyPatch) -> None:
    path = [str(INTERPRETED), str(TRITON), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # for an engine without a sampler


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


@pytest.fixture(scope="module")
def tied_adapters(model: Path) -> Iterator[SamplerClient]:
    if not TRITON.is_dir():
        pytest.skip("scripts/triton.sh, which `make test-all` runs, has not installed Triton")
    room = {"max_lora_rank": 5, "max_adapters": 2, "kv_cache_bytes": 2**20, "max_num_seqs": 16}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            interpret(patch)
            client = stack.enter_context(sampler_process(model, model_runner="v2", **room))
        yield client


@pytest.fixture
def sampler(tied_adapters: SamplerClient) -> SamplerClient:
    return tied_adapters


@pytest.fixture
def either(tied_adapters: SamplerClient) -> SamplerClient:
    return tied_adapters
