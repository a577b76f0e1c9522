"""YAML settings files, read as YAML 1.2 reads them: ``1e-4`` is a number, ``on`` and ``off`` are text. Imports no torch."""

import json
import re
from functools import cache
from typing import Any

from groupwise.errors import require_extra
from groupwise.system import files

SUFFIXES = (".yaml", ".yml")

_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
}
"""Pattern and first characters of values that are no text (YAML 1.2.2, section 10.3.2). PyYAML's own are of YAML 1.1."""


def parse_yaml(data: bytes) -> Any:
    """The value of a YAML text, made of what JSON has.

    Raises:
        ValueError: it is broken, has aliases, tags of Python or a key twice, or exceeds the limits of ``files.parse_json``.
        MissingExtraError: PyYAML is not installed.
    """
    require_extra("yaml", "yaml")
    import yaml

    try:
        tree = yaml.load(data, _loader())  # noqa: S506  a SafeLoader
        return files.parse_json(json.dumps(tree).encode())
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses aliases, which could stand for gigabytes, and keys that come twice."""

        yaml_implicit_resolvers: dict[str, Any] = {}  # in place of those of YAML 1.1

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(
                    f"line {self.peek_event().start_mark.line + 1} has an alias; fix: write the value again"
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"the key {twice!r:.100} comes twice")
            return super().construct_mapping(node, deep)

    for kind, (pattern, first) in _SCALARS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})$"), list(first))
    return Loader
