"""The entry of accelerate launch: how many threads a single process takes."""

import pytest

from scripts.sft import free_threads


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "1", "WORLD_SIZE": "1"}, None),
        ({"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}, "1"),
        ({"OMP_NUM_THREADS": "4"}, "4"),
        ({}, None),
    ],
)
def test_a_single_process_is_not_held_to_one_thread(environment, threads):
    free_threads(environment)
    assert environment.get("OMP_NUM_THREADS") == threads
