"""Each test file has the name and the folder of a module, and each module has a test."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "orchestrator", "workers", "lorafleet")

# Test files and folders below tests/<package>/<folder>/ that are named after no module there, each with its reason.
NAMED_OTHERWISE = {
    "router/faults": "faults of clients, engines and hosts, each through the whole router",
    "router/http/test_engine_attempt.py": "engine_attempt.py of router/request on both event loops: see the conftest",
}

# Modules without a test file of their own, and the file that tests them through what calls them.
TESTED_FROM_OUTSIDE = {
    "lorafleet/cli/local/up": "lorafleet/local/test_up.py",
    "lorafleet/service/http/bodies": "lorafleet/service/http/test_json_count.py",
    "lorafleet/service/object_stores": "workers/sources/test_guard.py",
    "lorafleet/service/process": "lorafleet/test_serve.py",
    "lorafleet/sim/answers": "contract/test_formats.py",
    "lorafleet/sim/generation": "contract/test_engine.py",
    "orchestrator/agentless/canary": "orchestrator/agentless/test_engine.py",
    "orchestrator/agentless/transport": "orchestrator/agentless/test_engine.py",
    "orchestrator/api/decisions": "router/api/test_questions.py",
    "orchestrator/api/rollouts": "orchestrator/reconcile/test_served_names.py",
    "orchestrator/api/traffic": "orchestrator/traffic/test_book.py",
    "orchestrator/api/uploads": "simulation/test_uploads.py",
    "orchestrator/api/views": "orchestrator/api/test_placements.py",
    "orchestrator/configmaps/edits": "kube/test_configmaps_edit_races.py",
    "orchestrator/configmaps/rendering": "kube/test_configmaps.py",
    "orchestrator/configmaps/writer": "kube/test_configmaps_faults.py",
    "orchestrator/core/placement/choose": "orchestrator/core/placement/test_place.py",
    "orchestrator/intent/bytes_copier": "orchestrator/intent/test_publisher.py",
    "orchestrator/model/aliases": "orchestrator/api/test_aliases.py",
    "orchestrator/model/health": "orchestrator/leadership/test_leadership.py",
    "orchestrator/model/plans": "lorafleet/cli/changes/test_plan.py",
    "orchestrator/model/published": "orchestrator/intent/test_publisher.py",
    "orchestrator/model/workers": "orchestrator/api/test_fleet.py",
    "orchestrator/postgres/store": "orchestrator/test_processes.py",
    "orchestrator/reconcile/context": "orchestrator/reconcile/test_reconciler.py",
    "orchestrator/store/audit": "orchestrator/reconcile/test_heartbeats_operations.py",
    "router/api/adapter_calls": "router/api/test_engine_calls.py",
    "router/api/asks": "router/api/test_questions.py",
    "router/api/control_calls": "router/api/test_engine_calls.py",
    "router/api/forward": "simulation/test_uploads.py",
    "router/api/pauses": "router/api/test_engine_calls.py",
    "router/core/schedule/replica_book": "router/core/schedule/test_load.py",
    "router/items/stored": "router/protocols/test_routes.py",
    "router/request/services": "router/request/test_run.py",
    "router/telemetry/otlp": "router/telemetry/test_tracing.py",
    "workers/agent/uploaded_adapters": "workers/storage/test_uploads.py",
    "workers/engines/client": "workers/engines/test_vllm.py",
    "workers/engines/guard": "workers/engines/test_process.py",
    "workers/file_routes": "workers/agent/test_file_fetcher.py",
    "workers/inventory/context": "workers/inventory/test_installed_adapters.py",
    "workers/lifespan": "workers/agent/test_heartbeat.py",
    "workers/storage/unpickle": "workers/storage/test_pickled.py",
}


def modules(root):
    """Path of each product module below `root`, without `.py`, and without `__init__` and `__main__`."""
    files = (path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*.py"))
    return {path.with_suffix("").as_posix() for path in files if not path.name.startswith("__")}


def folders(root):
    """Path of each folder of the product below `root`."""
    return {
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_dir() and not path.name.startswith("__")
    }


def files_below(root):
    """Path of each test file of a product package below `tests/`."""
    tests = root / "tests"
    return {path.relative_to(tests).as_posix() for package in PACKAGES for path in (tests / package).rglob("test_*.py")}


def imported_modules(source):
    """What a file imports: as paths without `.py`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name.replace(".", "/") for name in found}


def subjects(test):
    """Paths of the modules that a test file may be named after: its whole name, or less of it before a subject."""
    folder, _, name = test.removesuffix(".py").rpartition("/test_")
    words = name.split("_")
    return {f"{folder}/{'_'.join(words[:n])}" for n in range(1, len(words) + 1)}


def misnamed(tests, places):
    """Test files below tests/<package>/<folder>/ that stand beside no module or folder of their name."""
    return {test for test in tests if test.count("/") > 1 and subjects(test).isdisjoint(places)}


def unfindable(tests, imports, modules):
    """Modules that no test file is named after, and none imports."""
    return modules - imports - set().union(*map(subjects, tests))


@pytest.fixture(scope="module")
def imports():
    return set().union(*(imported_modules(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")))


def test_every_test_file_has_the_name_of_a_module_in_its_folder():
    left = {test for test in misnamed(files_below(ROOT), modules(ROOT) | folders(ROOT)) if not excused(test)}
    assert not left, f"name each after a module of the same folder of the product, plus a subject: {sorted(left)}"


def excused(test):
    return test in NAMED_OTHERWISE or Path(test).parent.as_posix() in NAMED_OTHERWISE


def test_every_module_is_imported_by_a_test_or_has_a_test_of_its_name(imports):
    left = unfindable(files_below(ROOT), imports, modules(ROOT)) - TESTED_FROM_OUTSIDE.keys()
    assert not left, f"write tests/<folder>/test_<module>.py for each: {sorted(left)}"


def test_every_entry_of_the_tables_is_still_needed(imports):
    wrong = misnamed(files_below(ROOT), modules(ROOT) | folders(ROOT))
    needless = {path for path in NAMED_OTHERWISE if not any(f"{test}/".startswith(f"{path}/") for test in wrong)}
    needless |= TESTED_FROM_OUTSIDE.keys() - unfindable(files_below(ROOT), imports, modules(ROOT))
    assert not needless, f"remove from the tables of this file: {sorted(needless)}"
    missing = {test for test in TESTED_FROM_OUTSIDE.values() if not (ROOT / "tests" / test).is_file()}
    assert not missing, f"TESTED_FROM_OUTSIDE names files that tests/ does not have: {sorted(missing)}"


def test_a_test_of_a_module_in_another_folder_is_found():
    product = {"router/core/kv/index", "router/core/queue/quota"}
    tests = {"router/core/queue/test_index.py", "router/core/kv/test_index_growth.py", "router/test_app.py"}
    assert misnamed(tests, product) == {"router/core/queue/test_index.py"}


def test_a_module_without_a_test_is_found():
    product = {"router/core/kv/index", "router/core/kv/chains", "router/core/queue/quota"}
    imports = imported_modules("from router.core.queue import quota\n")
    assert unfindable({"router/core/kv/test_index_growth.py"}, imports, product) == {"router/core/kv/chains"}
