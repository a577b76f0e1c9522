"""``groupwise config``: the settings of a run as a file."""

import json
from collections.abc import Sequence

from groupwise.cli.parser import Parser

HELP = """Print all settings of a run as JSON, which train takes as a file.

  groupwise config CartPole-v1 --algorithm ppo > my_run.json
  groupwise config my_run.json --algorithm.gamma 0.98
  groupwise config --schema                        JSON Schema, for your editor

Options, as those of train:
  --preset NAME                       credit and objective of a paper; see: groupwise list
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Print the settings that ``argv`` describes, or their schema."""
    from groupwise.cli.options import parse_options
    from groupwise.config import json_schema, to_json

    if "--schema" in argv:
        print(json.dumps(json_schema(), indent=2))
    else:
        flags = ("schema", "preset")
        print(to_json(parse_options(argv, prog="groupwise config", description=HELP, flags=flags)))
    return 0
