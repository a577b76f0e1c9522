"""Presets, and the variants of docs/credit.md, which are settings over a preset."""

import json
import re
from pathlib import Path

from groupwise.config import load as presets

PAGE = Path(__file__).parents[2] / "docs" / "credit.md"
VARIANTS = {
    name: (preset, json.loads(settings))
    for name, preset, settings in re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| `(\{.*?\})` \| \[", PAGE.read_text("utf-8"), re.MULTILINE
    )
}
"""Preset, and settings over it, of each variant."""
SETTINGS = {name: preset.settings for name, preset in presets.objective_presets().items()} | {
    name: presets.merge(presets.objective_preset(preset).settings, settings)
    for name, (preset, settings) in VARIANTS.items()
}
"""Fields of ``GRPOCfg`` of all presets and variants."""
