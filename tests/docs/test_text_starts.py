"""The table of shared starts of public text games says what the results say."""

import json

from scripts import ROOT, load

SCRIPT = load("benchmarks/text_starts.py")
GAMES = json.loads(SCRIPT.RESULTS.read_text(encoding="utf-8"))["games"]


def test_table_and_text_are_the_results():
    assert SCRIPT.TABLE.read_text(encoding="utf-8") == SCRIPT.table({"games": GAMES}), (
        "run: benchmarks/text_starts.py --table"
    )
    assert list(GAMES) == list(SCRIPT.GAMES)
    played = {name: row for name, row in GAMES.items() if "error" not in row}
    assert len(played) >= 20
    assert not any(row["started so"]["groups"] for row in played.values())
    apart = [name for name, row in played.items() if row["as it is"]["groups"]]
    text = " ".join((ROOT / "docs" / "text_environments.md").read_text(encoding="utf-8").split())
    assert f"tried {len(GAMES)} games and examples, of which {len(GAMES) - len(played)} stop with an error" in text
    assert f"In {len(apart)} of the other {len(played)}, members with equal seeds get different answers" in text


def test_what_parts_and_what_is_alike_is_found_again():
    for name in ("words, as in TRL", "2048 in a row, as in TRL", "reasoning-gym:chain_sum"):
        assert SCRIPT.measure(SCRIPT.GAMES[name]) == json.loads(json.dumps(GAMES[name]), object_hook=kept_as_tuple)


def kept_as_tuple(found):
    return found | ({"kept": tuple(found["kept"])} if "kept" in found else {})
