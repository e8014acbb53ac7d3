"""The adapters that exist because an engine without an agent lists them."""

from collections.abc import Container, Iterable, Mapping

from orchestrator.wire import checked_lora_id
from router.core.fleet import RoutableAdapter
from workers.wire import Metadata


def listed_adapters(reports: Iterable[Metadata], taken: Container[str]) -> Mapping[str, RoutableAdapter]:
    """The adapters that engines list under names which are nobody else's, by lora_id.

    Names that the fleet gave (`lora_id@digest12`) are the catalog's to know. Of one name under two base models the
    first base model's counts, as a name can stand for one thing only. Everybody may use them: whoever gave them to the
    engine has said no more.

    A name that no registration could have is passed over: vLLM takes any, also one that would break our headers.

    An engine that takes no adapters lists them with the reason; that counts where no other engine has the name.

    taken  names of the catalog's adapters and aliases, which mean those
    """
    found: dict[str, RoutableAdapter] = {}
    for report in reports:
        base_model = report.model.base_model
        for lora in report.lora.loaded_loras:
            if lora.engine_name != lora.lora_id or lora.lora_id in taken or not _is_lora_id(lora.lora_id):
                continue
            known = found.get(lora.lora_id)
            if known is None or _rank(base_model, lora.error) < _rank(known.base_model, known.error):
                found[lora.lora_id] = RoutableAdapter(
                    lora.lora_id, base_model, None, "", error=lora.error, is_listed=True
                )
    return found


def _rank(base_model: str | None, error: str | None) -> tuple[bool, str]:
    return error is not None, base_model or ""


def _is_lora_id(name: str) -> bool:
    try:
        checked_lora_id(name)
    except ValueError:
        return False
    return True
