"""Every resource of the orchestrator, defined once: core decides on it, the store keeps it, REST shows it.

Imports the standard library, annotated_types, pydantic where core does not read, `lorafleet.identity`, `workers.wire`
and itself.
"""
