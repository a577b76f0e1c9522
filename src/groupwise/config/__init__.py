"""Every setting: its classes, presets, files and fields to settings, and their checks. Imports no torch."""

from groupwise.config.load import json_schema, load_config, resolve, resolve_text, to_json

__all__ = ["json_schema", "load_config", "resolve", "resolve_text", "to_json"]
