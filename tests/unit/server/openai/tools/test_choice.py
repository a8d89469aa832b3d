"""From ``tools`` to the schema of a list of calls."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.http.errors import ApiError
from penstock.server.openai.chat_protocol import Tool
from penstock.server.openai.tools.choice import list_of_calls


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def test_definitions_of_the_tools_schemas_move_to_the_root() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    uses = {"type": "object", "properties": {"p": {"$ref": "#/$defs/Point"}}, "$defs": {"Point": point}}
    schema = list_of_calls([tool("a", uses), tool("b", uses), tool("c")], single=True)
    assert schema["$defs"] == {"Point": point}
    assert schema["maxItems"] == 1
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert names == ["a", "b", "c"]
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    with pytest.raises(ApiError, match=r"tools\[0\]\.function\.parameters has \$defs \[1\]"):
        list_of_calls([tool("a", {"$defs": [1]})], single=False)
    with pytest.raises(ApiError, match=r"tools\[1\]\.function\.parameters"):
        list_of_calls([tool("a", uses), tool("b", {**uses, "$defs": {"Point": {"type": "string"}}})], single=False)
