"""``/docs``: the routes and their fields, from the application's own OpenAPI schema, as one page that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Response
from jinja2 import Environment

STYLE: Final = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { margin-top: 2rem; border-top: 1px solid #8886; padding-top: 1rem; font-size: 1.1rem; }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884; }
"""
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: the API</title><style>{{ style }}</style>
<h1>{{ title }} {{ version }}</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{% for route in routes %}<h2><code>{{ route.method }} {{ route.path }}</code></h2>
<p>{{ route.words }}</p>
{% if route.fields %}<table><tr><th>field<th>type<th></tr>
{% for field in route.fields %}<tr><td><code>{{ field.name }}</code><td>{{ field.kind }}
<td>{{ "required. " if field.required }}{{ field.words }}</tr>
{% endfor %}</table>{% endif %}
{% endfor %}</html>
"""


@dataclass(frozen=True)
class Field:
    name: str
    kind: str
    required: bool
    words: str


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    words: str
    fields: list[Field]


def api_page_router(app: FastAPI) -> APIRouter:
    routes = APIRouter()

    @cache
    def page() -> str:
        environment = Environment(autoescape=True, trim_blocks=True)
        found = list(routes_of(app.openapi()))
        return environment.from_string(PAGE).render(title=app.title, version=app.version, style=STYLE, routes=found)

    @routes.get("/docs")
    def docs() -> Response:
        return Response(page(), media_type="text/html", headers={"Content-Security-Policy": POLICY})

    return routes


def routes_of(openapi: Mapping[str, Any]) -> Iterator[Route]:
    schemas = openapi.get("components", {}).get("schemas", {})
    for path, methods in openapi["paths"].items():
        for method, told in methods.items():
            words = told.get("description") or told.get("summary", "")
            yield Route(method.upper(), path, words, list(fields_of(told, schemas)))


def fields_of(route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Field]:
    """The fields of the route's body, if it takes one."""
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = schemas.get(content.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
    required = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        yield Field(name, kind_of(one), name in required, one.get("description", ""))


def kind_of(schema: Mapping[str, Any]) -> str:
    """A schema's type in words, without null: every field that is not required may be null."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            kinds = (kind_of(one) for one in schema[alternatives] if one.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return " or ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
