"""Offers of adapters to an engine: what is written is read, and nothing else is."""

import shutil

from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine.vllm_plugin.engine_reports import engine_folder, forget_engine_reports
from lorafleet.engine.vllm_plugin.offers import (
    mark_as_taking_offers,
    read_offer,
    takes_offers,
    withdraw_all_offers,
    withdraw_offer,
    write_offer,
)
from orchestrator.model.offers import AdapterOffer


def offered(tmp_path, name: str) -> AdapterOffer:
    files = tmp_path / "files"
    files.mkdir(exist_ok=True)
    (files / "adapter_config.json").touch()
    write_offer(tmp_path, AdapterOffer(name, str(files), "ab"))
    return AdapterOffer(name, str(files), "ab")


@given(st.text(min_size=1), st.text(min_size=1))
def test_only_the_offered_name_is_found_whatever_its_characters(tmp_path_factory, name, other):
    folder = tmp_path_factory.mktemp("offers")
    offer = offered(folder, name)
    assert read_offer(folder, name) == offer
    assert (read_offer(folder, other) is None) == (other != name)
    withdraw_offer(folder, name)
    withdraw_offer(folder, name)
    assert read_offer(folder, name) is None


def test_a_damaged_offer_and_one_whose_files_are_gone_are_none(tmp_path):
    offered(tmp_path, "a@1")
    (path,) = (engine_folder(tmp_path) / "offers").iterdir()
    whole = path.read_text()
    for damaged in ("", "{}", "[]", whole.replace("a@1", "b@1"), " " * (1 << 17)):
        path.write_text(damaged)
        assert read_offer(tmp_path, "a@1") is None
    path.write_text(whole)
    assert read_offer(tmp_path, "a@1") is not None
    shutil.rmtree(tmp_path / "files")
    assert read_offer(tmp_path, "a@1") is None


def test_the_next_start_of_an_engine_finds_no_offer(tmp_path):
    mark_as_taking_offers(tmp_path)
    offered(tmp_path, "a@1")
    assert takes_offers(tmp_path)
    forget_engine_reports(tmp_path)
    assert (takes_offers(tmp_path), read_offer(tmp_path, "a@1")) == (False, None)
    offered(tmp_path, "a@1")
    withdraw_all_offers(tmp_path)
    assert read_offer(tmp_path, "a@1") is None
