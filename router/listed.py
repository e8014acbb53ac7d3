"""Workers without an agent: which engines they are, and the adapters that exist because such an engine lists them."""

from collections.abc import Container, Iterable, Mapping
from urllib.parse import urlsplit

from router.core.fleet import Adapter
from workers.wire import Metadata


def engines_by_id(named: Iterable[str]) -> dict[str, str]:
    """worker id -> URL of `url` or `id=url`; without a name the worker is called by its host and port.

    raises  ValueError, naming the one that is wrong
    """
    found: dict[str, str] = {}
    for name in named:
        id_, equals, url = name.rpartition("=")
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or (equals and not id_):
            raise ValueError(f"engines: {name!r} must be http://host:port or id=http://host:port")
        id_ = id_ or parts.netloc
        if id_ in found:
            raise ValueError(f"engines: {id_!r} is named twice; give one of them another id, as id={url}")
        found[id_] = url.rstrip("/")
    return found


def listed_adapters(reports: Iterable[Metadata], taken: Container[str]) -> Mapping[str, Adapter]:
    """The adapters that engines list under names which are nobody else's, by lora_id.

    Names that the fleet gave (`lora_id@digest12`) are the catalog's to know. Of one name under two base models the
    first base model's counts, as a name can stand for one thing only. Everybody may use them: whoever gave them to the
    engine has said no more.

    taken  names of the catalog's adapters and aliases, which mean those
    """
    found: dict[str, Adapter] = {}
    for report in reports:
        base_model = report.model.base_model
        for lora in report.lora.loaded_loras:
            if lora.engine_name != lora.lora_id or lora.lora_id in taken:
                continue
            known = found.get(lora.lora_id)
            if known is None or base_model < (known.base_model or ""):
                found[lora.lora_id] = Adapter(lora.lora_id, base_model, None, "", is_listed=True)
    return found
