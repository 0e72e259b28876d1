"""The job spec's JSON Schema, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import (
    BoolSchema,
    DictSchema,
    FloatSchema,
    IntSchema,
    LiteralSchema,
    ModelSchema,
    StringSchema,
)

from hvdtrain.spec.models import JobSpec

_VARIABLE = {"type": "string", "pattern": r"\$\{"}
_EITHER = ("task", "command")


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of job specs as they're written: with ``${NAME}``, and text without quotes."""
    schema = JobSpec.model_json_schema(schema_generator=_AsWritten)
    schema["$schema"] = GenerateJsonSchema.schema_dialect
    schema["title"] = "hvdtrain job spec"
    schema["oneOf"] = [
        {"required": [key], "properties": {key: {"not": {"type": "null"}}, other: {"type": "null"}}}
        for key, other in (_EITHER, _EITHER[::-1])
    ]
    return schema


class _AsWritten(GenerateJsonSchema):
    """What a key takes in the file, where pydantic would describe what it becomes."""

    def int_schema(self, schema: IntSchema) -> JsonSchemaValue:
        return {"anyOf": [super().int_schema(schema), _VARIABLE]}

    def float_schema(self, schema: FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), _VARIABLE]}

    def bool_schema(self, schema: BoolSchema) -> JsonSchemaValue:
        return {"anyOf": [super().bool_schema(schema), _VARIABLE]}

    def literal_schema(self, schema: LiteralSchema) -> JsonSchemaValue:
        return {"anyOf": [super().literal_schema(schema), _VARIABLE]}

    def str_schema(self, schema: StringSchema) -> JsonSchemaValue:
        return super().str_schema(schema) | {"type": ["string", "number", "boolean"]}

    def dict_schema(self, schema: DictSchema) -> JsonSchemaValue:
        return super().dict_schema(schema) | {"type": ["object", "null"]}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        section = super().model_schema(schema)
        return section if schema["cls"] is JobSpec else section | {"type": ["object", "null"]}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
