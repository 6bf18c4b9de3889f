"""Chooses what `make test` leaves to `make test-slow`: whatever takes longer than its share of five minutes.

`make test PYTEST_ARGS=--durations=0 | python -m tests.slow_tests` adds to tests/slow.txt what took longer than MOST_S.
A test that is slow by nature says so with a mark; this list is of the many that take a second or two.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

LIST = Path(__file__).with_name("slow.txt")
MOST_S = 0.2
ALL = bool(os.environ.get("ARCHLAB_ALL"))  # `make test-all`: also what `make test-slow` tries only some of
# The files that take longest come first, so that no worker waits for another that began one of them last.
FIRST = (
    "tests/search/running/test_faults.py",
    "tests/kernels/test_ops.py",
    "tests/arch_dsl/test_conformance.py",
    "tests/search/running/test_partitions.py",
    "tests/search/running/test_measuring.py",
    "tests/dashboards/test_every_page_browser.py",
    "tests/dashboards/test_write_browser.py",
    "tests/search/executors/test_ray.py",
    "tests/search/running/test_end_to_end.py",
    "tests/search/training/test_parallel.py",
    "tests/kernels/test_aot.py",
    "tests/dashboards/test_scale_browser.py",
    "tests/arch_dsl/plain/test_plain.py",
    "tests/kernels/test_linear_recurrence.py",
    "tests/test_docs.py",
    "tests/search/calibration/test_calibrate.py",
    "tests/search/evaluation/test_probe_separations.py",
)
# Of the cases of these `make test-slow` tries every so-manieth, drawn by name, and `make test-all` each.
SHARES = {
    "test_a_card_gets_one_graph_of_every_entry": 6,
    "test_a_card_takes_the_steps_of_every_entry": 4,
    "test_a_budget_gives_a_model_of_that_shape_with_about_so_many_parameters": 2,
    "test_a_committed_result_is_of_a_study_as_it_is": 2,
    "test_a_tiny_model_learns_alike_by_formulas_and_by_torch": 2,
    "test_altering_any_field_breaks_the_parity": 4,
    "test_compiles_into_one_graph": 4,
    "test_every_address_is_a_whole_page_in_all_widths": 4,
    "test_every_field_changes_the_result_at_every_place": 4,
    "test_every_field_changes_the_result_at_the_first_place_that_takes_it": 2,
    "test_every_sampler_goes_on_with_the_same_proposals_after_kills": 3,
    "test_every_study_for_a_gpu_is_planned_without_a_network": 4,
    "test_holds": 2,
    "test_is_captured_and_exported_as_one_graph": 4,
    "test_layout_does_not_change_results": 2,
    "test_other_models_and_recipes_are_divided_too": 2,
    "test_outputs_and_gradients_match_float64": 4,
    "test_the_default_finds_the_best_variant_in_95_percent_of_studies": 2,
    "test_three_steps_with_triton_follow_those_with_torch": 2,
    "test_tiny_is_captured_as_one_graph": 4,
    "test_tiny_learns": 2,
    "test_triton_gives_the_same_bits_twice": 2,
}
# Scenarios of a minute and more that `make test-all` alone runs: a nearer one of the same promise stays,
# or `make partitions` and `make storm` have more of them.
LONGEST = (
    "tests/cli/test_gpu_report.py::test_parts_run_on_this_device_and_are_written",
    "tests/dashboards/test_scale_browser.py::test_the_benchmark_measures_every_goal_and_a_first_visit_is_small",
    "tests/kernels/test_aot.py::test_what_older_cards_have_of_their_own_compiles_as_the_committed_report_says",
    "tests/search/calibration/test_calibrate.py::test_a_rate_that_is_far_too_low_is_found_out",
    "tests/search/evaluation/test_probe_separations.py"
    "::test_recall_needs_two_layers_of_attention_or_a_state_with_room_for_the_pairs",
    "tests/search/executors/test_ray.py::test_a_machine_of_a_cluster_that_dies_costs_its_trials_nothing[gangs]",
    "tests/search/objectives/test_objective_training.py::test_a_t5_reconstructs_better_than_the_unigram_distribution",
    "tests/search/running/test_driver.py::test_ten_thousand_trials_of_a_planned_study_end_once_each",
    "tests/search/running/test_end_to_end.py"
    "::test_ray_interrupted_once_and_killed_twice_ends_with_the_table_of_an_uninterrupted_run",
    "tests/search/running/test_measuring.py::test_a_run_killed_while_measuring_loses_only_the_evaluation_that_ran[ray]",
    "tests/search/running/test_partitions.py::test_a_study_on_a_cluster_that_falls_apart_ends_as_an_undisturbed_one"
    "[half-open]",
    "tests/search/running/test_partitions.py::test_a_study_on_a_cluster_that_falls_apart_ends_as_an_undisturbed_one"
    "[deaf]",
    "tests/search/running/test_storm.py::test_a_study_in_a_storm_ends_as_an_undisturbed_one",
    "tests/search/sections/test_recipes.py::test_a_gate_that_helps_a_rough_start_is_found_out_by_a_second_recipe",
    "tests/search/sections/test_scaling.py::test_a_planted_surface_is_within_its_intervals",
    "tests/search/sections/test_tuning_end_to_end.py"
    "::test_a_tuned_study_killed_on_the_way_ends_with_the_table_of_one_that_was_not",
    "tests/search/training/test_parallel.py::test_four_processes_train_the_trial_of_one",
)
# What every change should meet, although it takes longer: a part of each door, and of each promise.
KEPT = (
    "tests/arch_dsl/plain/test_plain.py::test_computes_the_same_in_an_interpreter_with_torch_alone",
    "tests/arch_dsl/test_conformance.py::test_is_captured_without_a_break",
    "tests/arch_dsl/zoo/test_parity_modern.py::test_altering_any_field_breaks_the_parity[llama]",
    "tests/cli/test_cli.py::test_help_status_and_completion_import_nothing_heavy",
    "tests/cli/test_cli.py::test_interrupted_run_exits_with_130_and_goes_on",
    "tests/dashboards/test_browser.py::test_study_page_shows_the_numbers_of_the_report",
    "tests/fuzz/test_studies.py::test_a_file_with_changed_bytes_loads_or_says_where",
    "tests/kernels/test_aot.py",
    "tests/search/executors/test_ray.py::test_trials_get_the_results_that_they_get_inline",
    "tests/search/running/test_driver_ends.py::test_a_study_killed_at_any_moment_ends_with_the_same_results[8]",
    "tests/search/running/test_end_to_end.py::test_a_study_run_twice_gives_the_same_report_but_for_timings",
    "tests/search/sections/test_seek.py::test_search_proposes_refuses_and_repeats_its_best",
    "tests/search/study/test_study_schema.py::test_it_is_a_schema_and_the_committed_one",
    "tests/test_docs.py::test_yaml_examples_load",
    "tests/test_docs_plugins.py",
    "tests/test_golden.py::test_the_list_of_studies_names_each_with_its_question",
    "tests/test_layers.py",
    "tests/test_security.py",
)


def longer(lines: Iterable[str]) -> set[str]:
    """The tests that took longer than MOST_S, by the durations that pytest printed."""
    found = (re.match(r"([\d.]+)s call +(\S.*)", line) for line in lines)
    ids = {match[2].rstrip() for match in found if match and float(match[1]) > MOST_S}
    return {name for name in ids if not name.startswith(KEPT)}


def is_left_to_all(name: str) -> bool:
    """Whether `make test-slow` leaves a slow test to `make test-all`."""
    share = SHARES.get(name.partition("[")[0].rpartition("::")[2], 1)
    return not ALL and (name in LONGEST or crc32(name.encode()) % share != 0)


def listed() -> set[str]:
    """The ids of the list."""
    return set(LIST.read_text("utf-8").splitlines()) if LIST.exists() else set()


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in sorted(listed() | longer(sys.stdin))), "utf-8")
