"""Build the documentation site: `make docs` runs `python -P -m docs.site .site`.

FOLDER/pages gets docs/*.md and docs/*.svg, the README as first page, the changelog, and for each service one page and
one JSON file with its OpenAPI document. Zensical then builds FOLDER/site from them by docs/zensical.toml, in strict
mode: a link to a page or a heading that does not exist ends the build with an error. The build reads no network.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from workers.app import build as build_worker
from workers.config import WorkerSettings

Json = Mapping[str, Any]
DOCS = Path(__file__).parent
ROOT = DOCS.parent
_RENAMED = {ROOT / "README.md": "index.md", ROOT / "CHANGELOG.md": "changelog.md"}
_METHODS = ("get", "put", "post", "patch", "delete", "head", "options")


def openapi_documents(folder: Path) -> Mapping[str, Json]:
    """The OpenAPI document of each service, by the service's name. Nothing is started.

    folder  an empty folder; the orchestrator's store and the agent's state are made in there
    """
    router, services = build_router(RouterSettings())
    services.tokenizers.close()
    orchestrator = build_orchestrator(OrchestratorSettings(store=folder / "orchestrator.db"))
    worker = build_worker(WorkerSettings(model="any/model", state_dir=folder, cache_dir=folder / "cache"), port=0)
    return {"router": router.openapi(), "orchestrator": orchestrator.app.openapi(), "worker": worker.app.openapi()}


def api_page(name: str, document: Json) -> str:
    """One service's OpenAPI document as a Markdown page: a section for each route, a table for each schema."""
    lines = [
        f"# REST API: {name}",
        "",
        f"Generated from the running code. The [OpenAPI document](openapi-{name}.json) is for tools; a running service"
        " has it at `/openapi.json`, and at `/docs` to try it.",
        "",
    ]
    for path, item in document["paths"].items():
        for method in (method for method in _METHODS if method in item):
            lines += _operation(f"{method.upper()} {path}", item[method])
    lines += ["## Schemas", ""]
    for schema_name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        lines += _schema(schema_name, schema)
    return "\n".join(lines)


def _operation(title: str, operation: Json) -> Iterator[str]:
    yield from (f"## `{title}`", "")
    text = operation.get("description") or operation.get("summary") or ""
    if text:
        yield from (_escaped(text), "")
    parameters = operation.get("parameters", ())
    if parameters:
        yield from ("| parameter | in | type | meaning |", "|---|---|---|---|")
        for each in parameters:
            needed = " (required)" if each.get("required") and each["in"] != "path" else ""
            yield (
                f"| `{each['name']}`{needed} | {each['in']} | {_type(each.get('schema', {}))} |"
                f" {_cell(each.get('description', ''))} |"
            )
        yield ""
    for media, body in operation.get("requestBody", {}).get("content", {}).items():
        yield from (f"Body (`{media}`): {_type(body.get('schema', {}))}", "")
        example = body.get("example") or next((each["value"] for each in body.get("examples", {}).values()), None)
        if example is not None:
            yield from ("```json", json.dumps(example, indent=2, ensure_ascii=False), "```", "")
    for status, answer in operation.get("responses", {}).items():
        kinds = {_type(body.get("schema", {})) for body in answer.get("content", {}).values()} - {"any"}
        yield f"- **{status}**: {_cell(answer.get('description', ''))} {', '.join(sorted(kinds))}".rstrip()
    yield ""


def _schema(name: str, schema: Json) -> Iterator[str]:
    yield from (f"### {name}", "")
    if text := schema.get("description"):
        yield from (_escaped(text), "")
    if "enum" in schema:
        yield from (", ".join(f"`{value}`" for value in schema["enum"]), "")
    fields = schema.get("properties", {})
    if fields:
        yield from ("| field | type | meaning |", "|---|---|---|")
        for field, of in fields.items():
            needed = " (required)" if field in schema.get("required", ()) else ""
            yield f"| `{field}`{needed} | {_type(of)} | {_cell(of.get('description', ''))} |"
        yield ""


def _type(schema: Json) -> str:
    """A JSON schema's type in a few words, with a link to a schema of the same page."""
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if parts := schema.get(key):
            return " or ".join(dict.fromkeys(_type(part) for part in parts))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(more := schema.get("additionalProperties"), Mapping):
        return f"map of {_type(more)}"
    return str(schema.get("type", "any"))


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Text that Markdown must not take for HTML or for a link."""
    return re.sub(r"([<\[\]])", r"\\\1", text)


def page_of(file: Path, text: str) -> str:
    """A Markdown file of the repository as a page of the site.

    Links between pages and to their pictures stay. A link to another file of the repository becomes its text and path:
    the site lacks it.

    file  where the text stands in the repository
    """

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = (file.parent / target).resolve()
        if path.parent == DOCS and path.suffix in {".md", ".svg"}:
            return f"[{text}]({path.name}{anchor})"
        if path in _RENAMED:
            return f"[{text}]({_RENAMED[path]}{anchor})"
        return f"{text} (`{path.relative_to(ROOT).as_posix()}`)"

    return re.sub(r"\[([^\[\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)", link, text)


def write_pages(folder: Path) -> None:
    """Write the site's sources to the folder, which is emptied of earlier ones."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for file, name in ({file: file.name for file in DOCS.glob("*.md")} | _RENAMED).items():
        (pages / name).write_text(page_of(file, file.read_text()))
    for picture in DOCS.glob("*.svg"):
        shutil.copy(picture, pages)
    with tempfile.TemporaryDirectory() as scratch:
        documents = openapi_documents(Path(scratch))
    for service, document in documents.items():
        (pages / f"openapi-{service}.json").write_text(json.dumps(document, indent=1))
        (pages / f"api-{service}.md").write_text(api_page(service, document))
    shutil.copy(DOCS / "zensical.toml", folder)


def main() -> int:
    """Write the pages and build the site; the exit status is Zensical's."""
    parser = argparse.ArgumentParser(prog="python -P -m docs.site", description=__doc__)
    parser.add_argument("folder", type=Path, help="where pages and site are written")
    folder = parser.parse_args().folder.resolve()
    if find_spec("zensical") is None:
        sys.exit(
            "python -P -m docs.site: Zensical is not installed; `make docs` installs it, or pip install -e '.[docs]'"
        )
    print("== pages, and the OpenAPI documents of three services", flush=True)  # noqa: T201
    write_pages(folder)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zensical", "build", "--clean", "--strict"], cwd=folder, check=False
    )
    if done.returncode == 0:
        print(f"the site is in {folder / 'site'}; look at it with: python -m http.server -d {folder / 'site'}")  # noqa: T201
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
