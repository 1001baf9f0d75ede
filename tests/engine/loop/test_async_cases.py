"""Every case in which running ahead of the results can go wrong, and the test that covers it.

A case that cannot occur here lists the test of the rule that excludes it. Paths are relative to
tests/engine.

 1. A stop token is seen late, with later steps of the request launched:
    loop/test_core.py::test_a_stop_token_ends_the_request_even_with_later_steps_launched
 2. A name is used again before the last steps of its first bearer landed:
    loop/test_async_requests.py::test_a_name_used_again_while_its_last_bearer_is_in_flight_gets_its_own_tokens
 3. max_tokens is known ahead: not one step is wasted:
    loop/test_request_endings.py::test_max_tokens_costs_no_wasted_token
 4. The model's context ends: no position past it is computed:
    loop/test_async_requests.py::test_the_models_context_ends_requests_that_run_ahead
 5. A request is preempted with steps in flight:
    schedule/test_preemption.py::test_a_preemption_with_tokens_in_flight_samples_them_again
 6. It is resumed before those steps landed:
    loop/test_async_requests.py::test_a_request_resumed_before_its_old_steps_landed_gives_each_token_once
 7. All requests are preempted at once, or the cache is reset:
    loop/test_async_requests.py::test_a_forced_preemption_drops_exactly_the_tokens_in_flight
    loop/test_async_requests.py::test_a_cache_reset_with_steps_in_flight_drops_nothing
 8. The token in flight of a preempted request is its last:
    loop/test_async_requests.py::test_a_request_preempted_with_its_last_token_in_flight_ends_once
 9. An abort arrives with a step in flight:
    loop/test_core.py::test_an_abort_that_has_arrived_wins_over_the_steps_own_ending
10. Blocks are released that a step in flight still writes:
    loop/test_request_endings.py::test_slots_and_blocks_return_when_the_newest_step_has_landed
11. A block would be published with a token that is not final:
    schedule/test_prefix_sharing.py::test_a_stop_tokens_block_is_not_published
12. A block is full, but its last token is in flight:
    loop/test_async_requests.py::test_a_block_is_published_only_when_its_last_token_has_landed
13. A block is published by a step that then fails:
    schedule/test_preemption.py::test_nothing_computed_before_a_failure_is_found_after_it
14. A chunk of a prompt that is not its last:
    loop/test_async_plans.py::test_a_chunk_that_is_not_the_last_gives_no_token_and_expects_none
15. A slot is used again:
    device/runner/test_request_state.py::test_a_reused_slot_keeps_nothing_of_its_last_owner
16. The host's lengths lag behind the device's:
    loop/test_async_plans.py::test_the_hosts_lengths_are_never_below_the_devices
17. A rejected draft was counted as computed:
    loop/test_draft_steps.py::test_a_step_keeps_the_right_drafts_and_one_token_more
18. A placeholder outlives its step. There are none:
    loop/test_async_plans.py::test_a_token_in_flight_never_stands_in_a_plan_as_a_placeholder
19. A grammar's mask needs a token in flight:
    schedule/test_constraints.py::test_a_constrained_row_joins_every_step_two_of_which_are_in_flight
20. Rows of a mask and rows of the batch differ. There is one count of rows:
    loop/test_async_plans.py::test_every_column_of_a_plan_and_of_its_result_has_one_entry_a_row
    schedule/test_constraints.py::test_constrained_and_free_requests_say_what_each_says_alone
21. A token comes for a request that is over, or that its grammar refuses:
    loop/test_async_requests.py::test_a_finished_request_takes_no_token_more_from_a_device_that_runs_on
    schedule/test_constraints.py::test_a_token_that_the_grammar_refuses_ends_its_request_alone
22. Logprobs of rows that are dropped:
    loop/test_core_messages.py::test_logprobs_go_with_the_rows_that_are_delivered
23. Logprobs through chunks and preemptions. Those of prompts are refused:
    loop/test_async_plans.py::test_logprobs_come_once_a_token_through_chunks_and_preemptions
24. What a step reads is written again for the next one:
    loop/test_async_plans.py::test_a_plan_in_flight_does_not_change_while_later_ones_are_made
25. Memory that is being copied to the host is given away:
    device/runner/test_async_rows.py::test_a_result_on_its_way_holds_its_device_memory_until_it_was_read
26. Penalties need the token in flight:
    device/runner/test_async_rows.py::test_penalties_of_the_next_step_count_the_token_that_no_host_has_seen
27. min_tokens is counted by a host that is behind:
    device/runner/test_request_state.py::test_stop_ids_count_only_after_min_tokens_and_length_always
    loop/test_request_endings.py::test_stop_ids_count_only_after_min_tokens
28. A stop string is found steps later:
    text/test_output.py::TestStopStrings::test_stop_across_tokens_ends_the_request_and_asks_for_an_abort
29. No request is left, but steps are in flight:
    loop/test_async_requests.py::test_the_engine_has_work_until_every_step_in_flight_has_landed
30. Requests end and no step follows:
    loop/test_async_requests.py::test_endings_without_a_next_step_are_delivered_and_free_everything
31. Draws for drafts and for tokens share their noise:
    device/sampling/test_sampler.py::test_seed_position_and_stream_matter
32. A step in flight raises:
    loop/test_core.py::test_a_failing_step_fails_only_its_requests_and_names_them
33. Rows are padded to the size of a draft. There are no drafts:
    loop/test_async_plans.py::test_a_row_that_decodes_computes_one_token_and_is_never_padded
34. Seats held back by steps in flight stop admission:
    loop/test_async_requests.py::test_seats_of_ended_requests_in_flight_come_back_to_those_who_wait

All of them at once, at random: test_async_fuzz.py and test_scheduler_soak.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

NUM_CASES = 34


def names_in(path: Path) -> set[str]:
    """Names of a file's tests, those of classes as `Class::test`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + m.name for m in members if isinstance(m, ast.FunctionDef)}
    return names


def test_every_case_has_a_test_that_exists() -> None:
    cases: dict[int, list[str]] = {}
    for line in (__doc__ or "").splitlines():
        if match := re.match(r" ?(\d+)\. .+:$", line):
            cases[int(match[1])] = []
        elif line.startswith("    "):
            cases[max(cases)].append(line.strip())
    assert list(cases) == list(range(1, NUM_CASES + 1))
    for case, tests in cases.items():
        assert tests, f"case {case} has no test"
        for name in tests:
            file, _, test = name.partition("::")
            assert test in names_in(Path(__file__).parents[1] / file), f"case {case}: no {name}"
