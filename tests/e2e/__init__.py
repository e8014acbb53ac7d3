"""Whole fleets on loopback, started with `lorafleet up`, seen from outside."""

import pytest

pytest.register_assert_rewrite("tests.e2e.fleets", "tests.e2e.scenarios", "tests.e2e.trainers")
