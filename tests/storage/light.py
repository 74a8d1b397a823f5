"""What of a storage's suite the short form leaves to the storages that it suits best. No tests here."""

import functools
from typing import Any

import pytest

HEAVY = (
    "test_any_history_of_calls_agrees_with_a_dict",
    "test_any_history_of_calls_agrees_with_a_dict_that_evicts",
    "test_a_storage_with_space_left_evicts_nothing",
    "test_a_call_may_name_thousands_of_objects",
    "test_a_process_that_is_killed_while_it_stores_leaves_only_whole_objects",
    "test_an_object_that_is_put_again_is_never_missing",
    "test_threads_that_store_and_delete_never_show_a_reader_half_an_object",
)


def light(suite: Any) -> Any:
    """Its heavy tests are in the long form alone."""
    for name in HEAVY:
        if hasattr(suite, name):
            setattr(suite, name, pytest.mark.long(_again(getattr(suite, name))))
    return suite


def _again(test: Any) -> Any:
    """Another function, whose marks are not those of the suite's."""

    @functools.wraps(test)
    def again(*args: Any, **more: Any) -> None:
        test(*args, **more)

    return again
